"""Programs for other arguments and modes, on one device; on several see
tests/features/capture/test_returns.py."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.models.returns import classifier, decoder
from support.processes.returns import difference
from torch import Tensor, nn

import meshfold
from meshfold.errors import CaptureError, OptionError
from meshfold.ir.options import CompileOptions
from meshfold.validation.float64_mode import float64_everywhere

ONE = "local-cpux1"


@pytest.fixture(scope="module")
def compiled() -> tuple[nn.Module, dict[str, Tensor], meshfold.CompiledModel]:
    model, batch = decoder("output", dropout=0.5)
    with float64_everywhere():
        return model, batch, meshfold.compile(model, ONE, batch)


def test_without_labels_a_model_gives_what_it_gives(
    compiled: tuple[nn.Module, dict[str, Tensor], meshfold.CompiledModel],
) -> None:
    model, batch, made = compiled
    made.eval()
    model.eval()
    with torch.no_grad(), float64_everywhere():
        for idx in (batch["idx"], batch["idx"][:1, :3], batch["idx"]):
            assert difference(made(idx), model(idx)) < 1e-15
            assert difference(made(idx=idx, targets=None), model(idx)) < 1e-15
        scaled = made(batch["idx"], batch["targets"], 2.0)
        assert difference(scaled, model(**batch, scale=2.0)) < 1e-15
    assert len(made._calls._forms) == 3
    made.train()
    model.train()


def test_forward_programs_follow_the_parameters_and_drop_in_train_mode(
    compiled: tuple[nn.Module, dict[str, Tensor], meshfold.CompiledModel],
) -> None:
    model, batch, made = compiled
    with torch.no_grad(), float64_everywhere():
        dropped = [made(batch["idx"]).logits for _ in range(2)]
        assert not torch.equal(*dropped)
        made.eval()
        before = made(batch["idx"]).logits
        weight = made.get_parameter("head.weight")
        weight.mul_(2)
        assert torch.allclose(made(batch["idx"]).logits, 2 * before)
        weight.mul_(0.5)
    made.train()


@pytest.mark.parametrize(
    ("arguments", "given", "message"),
    [
        (["idx"], {}, "the batch has tensors idx; the program was captured with .*torch.no_grad"),
        (["idx", "targets"], {"scale": 2.0}, r"argument scale=2.0 was not captured with this"),
        (
            ["idx"],
            {"labels": 3},
            "Decoder takes no argument 'labels'; it takes idx, targets, scale",
        ),
    ],
)
def test_with_gradients_other_arguments_are_refused(
    compiled: tuple[nn.Module, dict[str, Tensor], meshfold.CompiledModel],
    arguments: list[str],
    given: dict[str, object],
    message: str,
) -> None:
    _, batch, made = compiled
    with pytest.raises(OptionError, match=message):
        made(*(batch[name] for name in arguments), **given)


def test_missing_arguments_are_named(
    compiled: tuple[nn.Module, dict[str, Tensor], meshfold.CompiledModel],
) -> None:
    _, batch, made = compiled
    with pytest.raises(OptionError, match="Decoder needs idx; pass it"), torch.no_grad():
        made(targets=batch["targets"])


def test_running_statistics_are_used_in_eval_mode() -> None:
    model, batch, loss_fn = classifier()
    options = CompileOptions(outputs="all")
    made = meshfold.compile(model, ONE, batch, loss_fn=loss_fn, options=options)
    made.train_step(batch)
    model(batch["input"])  # updates statistics alike
    made.eval()
    model.eval()
    with torch.no_grad():
        assert difference(made(batch["input"]), model(batch["input"])) < 1e-14
        found = made(batch["input"], batch["y"])
    assert float(found.loss - loss_fn(found.outputs, batch["y"])) == pytest.approx(0.0, abs=1e-14)


class Hidden(nn.Module):
    """Reads a buffer that no state_dict has without labels alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4), persistent=False)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        out = self.linear(x)
        return out + self.shift if y is None else F.mse_loss(out, y)


def test_buffers_that_nobody_holds_are_named() -> None:
    x = torch.randn(2, 4)
    made = meshfold.compile(Hidden(), ONE, (x, x))
    with pytest.raises(OptionError, match="reads buffer shift, which no training step"):
        with torch.no_grad():
            made(x)


def test_a_model_that_cannot_run_so_says_why() -> None:
    class Needing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
            return F.mse_loss(self.linear(x), y)

    x = torch.randn(2, 4)
    made = meshfold.compile(Needing(), ONE, (x, x))
    with pytest.raises(CaptureError, match="cannot be captured"), torch.no_grad():
        made(x)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, config: Any, factors: Any = None) -> Tensor:
        factor = 1.0 if factors is None else float(factors[1000])
        return (self.linear(x) * config.scale * factor).sum()


def test_an_argument_that_was_changed_in_place_is_another_one() -> None:
    model, x, config = Scaled(), torch.ones(2, 4), SimpleNamespace(scale=2.0)
    made = meshfold.compile(model, ONE, {"x": x, "config": config})
    assert torch.equal(made(x, config), model(x, config))
    assert torch.equal(made(x, SimpleNamespace(scale=2.0)), model(x, config))
    config.scale = 3.0
    with pytest.raises(OptionError, match="argument config=namespace.* was not captured with this"):
        made(x, config)
    factors = np.ones(2001)  # whose text leaves out what is in the middle
    with torch.no_grad():
        for change in (lambda: None, lambda: setattr(config, "scale", 4.0)):
            change()
            assert torch.equal(made(x, config), model(x, config))
        for factor in (2.0, 5.0):
            factors[1000] = factor
            assert torch.equal(made(x, config, factors), model(x, config, factors))
    config.scale = 2.0
    with pytest.raises(OptionError, match="argument factors=array.* was not captured"):
        made(x, config, factors)


class Unequal:
    """Has no truth value where it is compared."""

    scale = 2.0

    def __eq__(self, other: object) -> Any:
        return np.array([True, False])

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("config", [Unequal(), SimpleNamespace(scale=float("nan"))])
def test_an_argument_that_does_not_equal_itself_is_as_captured(config: Any) -> None:
    x = torch.ones(2, 4)
    made = meshfold.compile(Scaled(), ONE, {"x": x, "config": config, "factors": np.ones(2001)})
    made(x, config, np.ones(2001))
