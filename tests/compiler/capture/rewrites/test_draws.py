"""Random ops in their forms on draws: the numbers of the exact program are those that the model is
given in one process, and have the moments that torch promises."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from support.models.draws import DROP_PATHS
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.capture.pipeline import Captured, capture
from meshfold.ir.op_graph import DRAWS, Dependence
from meshfold.ops.reference_interpreter import run_graph
from meshfold.passes.graph.without_dropout import exact
from meshfold.validation.alike_draws import alike_draws
from meshfold.validation.float64_mode import float64_everywhere

# One worker captures each form once.
pytestmark = pytest.mark.xdist_group("draws")

X = torch.linspace(0.1, 0.9, 64 * 6 * 8, dtype=torch.float64).reshape(64, 6, 8)


class Applied(nn.Module):
    """A function of a tensor."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    **{f.__name__: (lambda x, f=f: f(x, 0.3)) for f in DROP_PATHS},
    "bernoulli": torch.bernoulli,
    "bernoulli.p": lambda x: torch.bernoulli(x, 0.3),
    "bernoulli_": lambda x: x.clone().bernoulli_(0.3),
    "bernoulli_ tensor": lambda x: torch.empty_like(x).bernoulli_(x),
    "rand": lambda x: x + torch.rand(64, 6, 8),
    "rand_like": torch.rand_like,
    "rand with a generator": lambda x: torch.rand(x.shape, generator=None),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 2),
    "randn": lambda x: torch.randn(x.shape),
    "randn_like": torch.randn_like,
    "normal_": lambda x: torch.empty(x.shape).normal_(1, 2),
    "normal of numbers": lambda x: torch.normal(1.0, 2.0, x.shape),
    "normal about a tensor": lambda x: torch.normal(x, 0.5),
    "normal as wide as a tensor": lambda x: torch.normal(0.5, x),
    "normal of tensors": lambda x: torch.normal(x, x.square()),
    "a distribution": lambda x: torch.distributions.Normal(x, 1.0, validate_args=False).rsample(),
    "exponential_": lambda x: torch.empty_like(x).exponential_(2.0),
    "gumbel_softmax": F.gumbel_softmax,
    "multinomial": lambda x: torch.multinomial(x.flatten(0, 1).sigmoid(), 1).view(64, 6, 1) + x,
    "multinomial of several": lambda x: (
        torch.multinomial(x.flatten(0, 1).sigmoid(), 8).view(64, 6, 8) + x
    ),
    "categorical": lambda x: (
        torch.distributions.Categorical(logits=x, validate_args=False).sample()[..., None] + x
    ),
    "randint": lambda x: torch.randint(-2, 5, x.shape) + x,
    "randint from 0": lambda x: torch.randint(5, x.shape) + x,
    "randint_like": lambda x: torch.randint_like(x, 5),
    "randint_like between": lambda x: torch.randint_like(x, 2, 5),
    "Dropout1d": nn.Dropout1d(0.3),
    "Dropout2d": lambda x: F.dropout2d(x.unflatten(-1, (2, 4)), 0.3),
    "Dropout3d": lambda x: F.dropout3d(x.unflatten(-1, (2, 2, 2)), 0.3),
    "AlphaDropout": nn.AlphaDropout(0.3),
    "FeatureAlphaDropout": nn.FeatureAlphaDropout(0.3),
}


@cache
def captured(function: Callable[[Tensor], Tensor]) -> Captured:
    with float64_everywhere():
        return capture(Applied(function).train(), {"x": X})


def result_of(found: Captured) -> Tensor:
    (result,) = run_graph(found.graph, {}, {}, found.constants, {"x": X}).values()
    return result


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_what_the_model_is_given(name: str) -> None:
    found = captured(FORMS[name])
    assert found.graph.notes == ()
    found = replace(found, graph=exact(found.graph))
    graph = found.graph
    targets = [op.target for r in graph.regions for op in r.graph.ops]
    assert DRAWS.intersection(targets)
    assert not [t for t in targets if any(name in t for name in ("empty", "bernoulli", "rand"))]
    program = result_of(found)
    with float64_everywhere(), alike_draws():
        expected = FORMS[name](X)
        again = FORMS[name](X)
    assert expected.equal(again)
    assert program.dtype == expected.dtype and (program - expected).abs().max() < 1e-12


@pytest.mark.parametrize("name", FORMS)
def test_a_form_has_the_mean_and_the_variance_of_torch(name: str) -> None:
    found = captured(FORMS[name])
    with torch.random.fork_rng():
        torch.manual_seed(1)
        ours = torch.stack(
            [
                next(iter(run_graph(found.graph, {}, {}, found.constants, {"x": X}).values()))
                for _ in range(20)
            ]
        )
        with float64_everywhere():
            theirs = torch.stack([FORMS[name](X) for _ in range(20)])
    assert ours.isfinite().all()
    scale = theirs.std()
    assert abs(ours.mean() - theirs.mean()) < 0.06 * scale
    assert abs(ours.std() - theirs.std()) < 0.06 * scale


def test_what_is_drawn_changes_with_every_step_as_the_batch_does() -> None:
    (region,) = captured(FORMS["rand"]).graph.regions
    (draw,) = (op for op in region.graph.ops if op.target in DRAWS)
    assert draw.operands == () and draw.kwargs == ()
    assert region.graph.values[draw.outputs[0]].depends is Dependence.BATCH


def test_a_probability_near_one_is_not_rounded_in_bfloat16() -> None:
    model = Applied(lambda x: torch.empty_like(x).bernoulli_(0.999))
    graph = capture(model, {"x": X.bfloat16()}).graph
    (region,) = graph.regions
    (draw,) = (op for op in region.graph.ops if op.target in DRAWS)
    assert region.graph.values[draw.outputs[0]].dtype == "float32"
    assert graph.outputs[0].dtype == "bfloat16"


def test_the_parameters_of_a_normal_get_no_gradient() -> None:
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return (torch.normal(self.mean.expand(6, 8), 0.5) * x).mean() + self.mean.mean()

    graph = capture(Learned(), {"x": X.float()}).graph
    ops = [op for r in graph.regions for op in r.graph.ops]
    assert [op.target for op in ops].count("aten.detach.default") == 1
