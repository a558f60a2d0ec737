"""Which arguments go to a model and which to its loss function."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshfold.capture.trace.loss_function import (
    LossAndOutputs,
    call_model,
    check_arguments,
    parameters_of,
)
from meshfold.errors import OptionError


class Net(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x if mask is None else x * mask


class Open(nn.Module):
    def forward(self, **arguments: Tensor) -> list[str]:
        return [*arguments]


def autoencoder(y: Tensor, x: Tensor) -> Tensor:
    return (y - x).square().sum()


X, T = torch.ones(2, 3), torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("loss_fn", "batch", "expected"),
    [
        (F.mse_loss, {"x": X, "target": T}, 1.0),
        (F.mse_loss, {"x": X, "whatever": T}, 1.0),
        (nn.MSELoss(), {"x": X, "mask": 2 * X, "y": T}, 4.0),
        (lambda out, a, b: (out - a - b).sum(), {"x": X, "a": X, "b": X}, -6.0),
        (autoencoder, {"x": X, "mask": 3 * X}, 24.0),
    ],
)
def test_what_the_model_does_not_name_goes_to_the_loss_function(
    loss_fn: Callable[..., Tensor], batch: dict[str, Tensor], expected: float
) -> None:
    check_arguments(Net(), batch, loss_fn)
    returned = call_model(Net(), batch, loss_fn)
    assert isinstance(returned, LossAndOutputs) and float(returned.loss) == expected
    assert torch.equal(returned.outputs, Net()(X, batch.get("mask")))


class Listed(nn.Module):
    def forward(
        self, x: Tensor, /, y: Tensor, *more: Tensor, scale: float = 1.0, **rest: Tensor
    ) -> list[Tensor | float]:
        return [x, y, *more, scale, *rest.values()]


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"x": 1, "y": 2}, [1, 2, 1.0]),
        ({"more_1": 4, "x": 1, "y": 2, "more_0": 3}, [1, 2, 3, 4, 1.0]),
        ({"y": 2, "x": 1, "scale": 5, "more_x": 6}, [1, 2, 5, 6]),
        ({f"more_{k}": k for k in range(12)} | {"x": -2, "y": -1}, [*range(-2, 12), 1.0]),
    ],
)
def test_a_model_gets_by_position_what_has_no_name_there(
    batch: dict[str, Any], expected: list[float]
) -> None:
    check_arguments(Listed(), batch)
    assert call_model(Listed(), batch) == expected


def test_no_argument_by_position_is_left_out() -> None:
    with pytest.raises(OptionError, match="Listed needs more_0, which the example inputs do not"):
        check_arguments(Listed(), {"x": X, "y": X, "more_1": X})


def test_a_model_that_takes_anything_gets_what_the_loss_function_does_not_name() -> None:
    returned = call_model(Open(), {"x": X, "labels": T}, lambda out, labels: labels.sum())
    assert returned.outputs == ["x"]


class Trained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, y: Tensor) -> Tensor:
        return (y * self.scale).sum()


@pytest.mark.parametrize(
    ("batch", "loss_fn", "message"),
    [
        ({"x": X, "labels": T}, None, "Net takes no argument 'labels'; it takes x, mask"),
        ({"mask": X}, None, "Net needs x, which the example inputs do not have; they have mask"),
        ({"x": X}, nn.MSELoss(), "MSELoss.forward cannot be called with the outputs: missing a"),
        (
            {"x": X, "a": T, "b": T},
            nn.MSELoss(),
            "cannot be called with the outputs, a, b: too many positional",
        ),
        ({"x": X}, Trained(), "loss_fn Trained has parameters, which would not be trained; make"),
    ],
)
def test_wrong_arguments_are_named(batch: dict[str, Any], loss_fn: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        check_arguments(Net(), batch, loss_fn)


def test_functions_without_a_signature_take_anything() -> None:
    assert parameters_of(Net()).names == ("x", "mask")
    assert parameters_of(Net()).needed == ("x",)
    assert parameters_of(max).takes_any
