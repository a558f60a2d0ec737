"""Checks on values of tensors: left out, or run in every step; numbers that go elsewhere."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import checks
from support.models.checks import all_at_once, bounded, either, finite
from support.programs.local_programs import emit_uniform, errors_of_a_step, on_ranks
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from meshfold.capture.gradients.route import Route
from meshfold.capture.pipeline import capture
from meshfold.capture.trace.export import _Watch
from meshfold.capture.trace.failures import explain_failure
from meshfold.capture.trace.layer_drop import LayerDrops
from meshfold.capture.trace.value_checks import ValueChecks
from meshfold.errors import CaptureError, ValueCheckError
from meshfold.ir.strategy import UniformStrategy
from meshfold.ops.reference_interpreter import run_graph
from meshfold.validation.float64_mode import float64_everywhere

BATCH, WIDTH = 4, 8


class Checked(nn.Module):
    """Checks the results of its layers, and its labels."""

    def __init__(self, check: Callable[[Tensor], object], layers: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.check = check

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            self.check(x)
        return x.square().mean()


X = {"x": torch.linspace(-1, 1, BATCH * WIDTH).reshape(BATCH, WIDTH)}


def test_assertions_are_left_out_and_named() -> None:
    graph = capture(Checked(all_at_once), X).graph
    plain = capture(Checked(lambda x: None), X).graph
    assert graph.regions == plain.regions
    notes = [n for n in graph.notes if n.startswith("a check of values is left out (checks.py")]
    assert len(notes) == 9
    assert any(n.endswith(": torch._check(x.max().item() < 3))") for n in notes)


class Block(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        finite(x)
        return x


def test_layers_that_check_are_traced_once_all_the_same() -> None:
    def block() -> nn.Module:
        return Block(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    model = nn.Sequential(*(block() for _ in range(4)), nn.Flatten(0), nn.Linear(32, 1))
    found = capture(model, {"input": X["x"]}).graph
    assert len(found.notes) == 1 and "if not x.isfinite().all(): raise)" in found.notes[0]
    assert found == capture(model, {"input": X["x"]}, full_capture=True).graph


def used(x: Tensor) -> Any:
    return x * x.max().item()


def chosen(x: Tensor) -> Any:
    return x if x.max().item() > 3 else -x


def sliced(x: Tensor) -> Any:
    return x[: x.max().item()]


def called(x: Tensor) -> Any:
    return x.max().item().bit_length()


def filled(x: Tensor) -> Any:
    return torch.full((2,), x.max().item())


class Distributed(nn.Module):
    """The loss of a variational autoencoder; torch.distributions check their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(WIDTH, 8), nn.Linear(4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mean, scale = self.encoder(x).chunk(2, -1)
        latent = Normal(mean, nn.functional.softplus(scale))
        apart = kl_divergence(latent, Normal(torch.zeros_like(mean), torch.ones_like(mean)))
        fit = Normal(self.decoder(mean), torch.ones_like(x)).log_prob(x)
        return apart.sum(-1).mean() - fit.mean()


class Heteroscedastic(nn.Module):
    """A loss of torch.nn.functional, which looks at the variances that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.layer(x).chunk(2, -1)
        variance = nn.functional.softplus(spread)
        loss = nn.functional.gaussian_nll_loss
        # Some variances are below eps, and torch lets their gradients pass.
        some = loss(mean, x[..., :1], variance.squeeze(-1), eps=0.6, reduction="sum")
        return loss(mean, x[..., :1], variance, full=True) + 0.1 * some


class Correlated(nn.Module):
    """The likelihood of a Gaussian process, whose covariance torch checks for symmetry first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        covariance = torch.eye(4) + torch.einsum("ni,nj->ij", y := self.layer(x), y)
        return -torch.distributions.MultivariateNormal(torch.zeros(4), covariance).log_prob(
            torch.ones(4)
        )


@pytest.mark.parametrize("made", [Distributed, Heteroscedastic, Correlated])
def test_distributions_of_torch_check_their_arguments(
    made: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    # torch.compile, if a test before this one ran it, switches them off for the whole process.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    model = made().double()
    batch = {"x": X["x"].double()}
    with float64_everywhere():
        captured = capture(model, batch)
    checking = "gaussian_nll_loss" if made is Heteroscedastic else "distribution.py"
    assert any(checking in note for note in captured.graph.notes)
    for strategy in (UniformStrategy(dp=2, zero=3), UniformStrategy(dp=1, tp=2)):
        program = emit_uniform(captured, strategy, BATCH)
        for errors in errors_of_a_step(model, batch, captured, program):
            assert max(errors.values()) < 1e-12


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (used, "torch.Tensor.item gives a shape or a number that depends on values"),
        (chosen, "a Python branch depends on the value of a tensor"),
        (sliced, "torch.Tensor.item gives a shape or a number"),
        (called, "torch.Tensor.item gives a shape or a number"),
        (filled, "torch.Tensor.item gives a shape or a number"),
    ],
)
def test_a_number_that_goes_elsewhere_is_refused(use: Any, reason: str) -> None:
    with pytest.raises(CaptureError, match=reason) as caught:
        capture(Checked(use), X)
    assert f"test_value_checks.py:{use.__code__.co_firstlineno + 1}" in caught.value.source


@pytest.mark.parametrize("check", [checks.caught, checks.suppressed])
def test_a_check_whose_exception_is_caught_is_a_branch(check: Any) -> None:
    try:
        with pytest.raises(CaptureError, match="a Python branch depends on the value"):
            capture(Checked(check), X)
        assert capture(Checked(checks.passed_on), X).graph.notes
    except OverflowError:
        pytest.fail("nothing is raised here, and what catches around a capture is not the model's")


def test_what_torch_says_of_values_is_said_in_our_words() -> None:
    watch = _Watch(LayerDrops(skips=False), ValueChecks(), None, Route())
    watch.failed = "torch.multinomial"
    text = "torch.multinomial gives a shape or a number that depends on values"
    with pytest.raises(CaptureError, match=text), explain_failure(watch):
        raise RuntimeError("Could not guard on data-dependent expression u0 > 3 (unhinted: u0 > 3)")


def test_a_number_that_is_kept_for_the_next_call_is_refused() -> None:
    class Keeps(nn.Module):
        last: Any = 0.0

        def forward(self, x: Tensor) -> Tensor:
            y = x * self.last if isinstance(self.last, float) else x
            self.last = x.max().item()
            return y.sum()

    with pytest.raises(CaptureError, match="forward changes what .*last holds"):
        capture(Keeps(), X)


@pytest.mark.parametrize(
    "strategy", [UniformStrategy(dp=2, zero=3), UniformStrategy(tp=2)], ids=str
)
def test_checks_run_in_every_step_on_all_ranks(strategy: UniformStrategy) -> None:
    torch.manual_seed(0)
    model = Checked(bounded, layers=2).double()
    batch = {"x": X["x"].double()}
    with float64_everywhere():
        captured = capture(model, batch, value_checks="run")
    assert [note.split(" (")[0] for note in captured.graph.notes] == [
        "a check of values is run in every step"
    ] * 2
    program = emit_uniform(captured, strategy, BATCH)
    errors = errors_of_a_step(model, batch, captured, program)
    assert max(e for rank in errors for e in rank.values()) < 1e-12

    def fails(rank: Any) -> str:
        with pytest.raises(ValueCheckError) as caught:
            rank.loss({"x": 1e3 * batch["x"]})
        return str(caught.value)

    model.layers[-1].weight.data.copy_(10 * torch.eye(WIDTH))
    messages = set(on_ranks(model, captured, program, fails))
    assert len(messages) == 1
    assert "a check of values fails (checks.py" in messages.pop()


def test_what_one_of_two_values_decides_cannot_be_run() -> None:
    assert capture(Checked(either), X).graph.notes
    with pytest.raises(CaptureError, match="cannot be run in a step, since one of several values"):
        capture(Checked(either), X, value_checks="run")


class Masked(nn.Module):
    """torch's encoder looks at its mask for a hint."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.encoder(x, mask=mask).square().mean()  # type: ignore[no-any-return]


def test_a_hint_of_torch_is_not_needed() -> None:
    model, batch = Masked().double(), {"x": torch.randn(4, 6, WIDTH, dtype=torch.float64)}
    with float64_everywhere():
        captured = capture(model, batch)
    program = emit_uniform(captured, UniformStrategy(dp=2, zero=3), 2)
    for errors in errors_of_a_step(model, batch, captured, program):
        assert max(errors.values()) < 1e-12


class DropsInPlace(nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.linear, self.drop = nn.Linear(4, 4), drop

    def forward(self, x):
        y = self.linear(x)
        self.drop(y)
        return y.square().mean()


@pytest.mark.parametrize(
    "drop",
    [
        nn.Dropout(0.25, inplace=True),
        lambda x: nn.functional.dropout(x, 0.25, inplace=True),
        lambda x: torch.dropout_(x, 0.25, True),
    ],
)
def test_dropout_in_place_stays_one_op(drop):
    regions = capture(DropsInPlace(drop).train(), {"x": torch.zeros(2, 4)}).graph.regions
    found = [op for r in regions for op in r.graph.ops]
    assert [op.target for op in found if "dropout" in op.target] == ["aten.native_dropout.default"]
    assert not [op for op in found if op.target == "meshfold.uniform.default"]


def test_dropout_in_place_of_eval_mode_is_nothing():
    regions = capture(DropsInPlace(nn.Dropout(inplace=True)).eval(), {"x": torch.zeros(2, 4)})
    assert not [op for r in regions.graph.regions for op in r.graph.ops if "dropout" in op.target]


def mask_dropped(mask: Tensor) -> Any:
    if mask.all():
        mask = None  # type: ignore[assignment]
    return None if mask is None else ~mask


def padding_dropped(mask: Tensor) -> Any:
    padding: Any = ~mask
    if not torch.any(padding):
        padding = None
    return padding


def other_mask(mask: Tensor) -> Any:
    if mask.all():
        padding = None
    else:
        padding = ~mask
    return padding


def chosen_mask(mask: Tensor) -> Any:
    padding = ~mask
    return padding if padding.any() else None


class Padded(nn.Module):
    """Attention that is given no mask where nothing is padded."""

    def __init__(self, padding: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.padding = padding

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        padding = self.padding(mask)
        made, _ = self.attention(x, x, x, key_padding_mask=padding, need_weights=False)
        loss: Tensor = made.square().mean()
        return loss


@pytest.mark.parametrize("padding", [mask_dropped, padding_dropped, other_mask, chosen_mask])
def test_a_way_around_a_mask_that_says_nothing_is_not_taken(padding: Any) -> None:
    torch.manual_seed(0)
    model = Padded(padding).double()
    x = torch.randn(3, 5, WIDTH, dtype=torch.float64)
    full = torch.ones(3, 5, dtype=torch.bool)
    some = full.clone()
    some[0, 3:] = False
    with float64_everywhere():
        captured = capture(model, {"x": x, "mask": full}, value_checks="run")
    (note,) = captured.graph.notes
    assert note.startswith("a way around a mask that says nothing is left out (test_value_checks")
    parameters = dict(model.named_parameters())
    for mask in (full, some):
        made = run_graph(captured.graph, parameters, {}, captured.constants, {"x": x, "mask": mask})
        torch.testing.assert_close(next(iter(made.values())), model(x, mask), rtol=0, atol=1e-14)


def reversed_mask(mask: Tensor) -> Any:
    if mask.any():
        mask = None  # type: ignore[assignment]
    return mask


def count_dropped(mask: Tensor) -> Any:
    return None if mask.sum() > 3 else ~mask


@pytest.mark.parametrize("padding", [reversed_mask, count_dropped])
def test_other_ways_around_a_mask_are_branches(padding: Any) -> None:
    x = torch.randn(3, 5, WIDTH)
    with pytest.raises(CaptureError, match="a Python branch depends on the value of a tensor"):
        capture(Padded(padding), {"x": x, "mask": torch.ones(3, 5, dtype=torch.bool)})
