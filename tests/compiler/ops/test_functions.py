"""autograd.Functions as ops: by name, with tuples for sequences, tensors alone as results."""

from typing import Any

import pytest
import torch
from support.models.functions import Gelu, Quantize
from torch import Tensor
from torch.autograd import Function

from meshfold.errors import UnsupportedOpError
from meshfold.ops.functions import FunctionOp, imported_function, packed
from meshfold.ops.registry import draws, torch_target


class Several(Function):
    """Takes a shape, returns a tensor, a number and None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, int, None]:
        assert isinstance(shape, tuple)
        return x.reshape(shape), len(shape), None

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> Any:
        return gradient.flatten(), None


def test_tensors_are_what_it_returns() -> None:
    (y,) = FunctionOp(Several, "Several")(torch.ones(6, requires_grad=True), [2, 3])
    assert y.shape == (2, 3) and y.requires_grad
    assert len(FunctionOp(Quantize, "Quantize")(torch.ones(2, 3), 4)) == 2


class Configured(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, config: dict[str, Any]) -> Tensor:
        assert type(config) is dict
        return x * config["scale"][1] + config["shift"]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


def test_dicts_are_packed_for_the_graph() -> None:
    config = {"scale": [1, 3], "shift": torch.ones(2)}
    held = packed(config)
    assert isinstance(held, tuple) and held[1] == ("scale", (1, 3))
    (y,) = FunctionOp(Configured, "Configured")(torch.ones(2), held)
    assert y.tolist() == [4, 4]
    assert packed((2, [3, {}])) == (2, (3, packed({})))
    assert FunctionOp(Configured, "Configured").without_storage(torch.ones(2), held).shape == (2,)


def test_what_is_stated_takes_the_place_of_the_forward() -> None:
    op = FunctionOp(Several, "Several", lambda x, shape: (x.new_empty(shape), 2))
    x = torch.ones(6, device="meta", requires_grad=True)
    y, number = op.without_storage(x, [2, 3])
    assert (y.shape, y.requires_grad, number) == ((2, 3), True, 2)
    assert [t.shape for t in op.tensors_without_storage(x, [3, 2])] == [(3, 2)]
    with pytest.raises(NotImplementedError, match="only what it returns is known"):
        y.sum().backward()


def test_names_lead_to_functions() -> None:
    name = "support.models.functions:Gelu"
    found = torch_target(name)
    assert isinstance(found, FunctionOp) and found.function is Gelu and found.__name__ == name
    assert not draws(name, (), ())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("support.models.functions:Absent", "no autograd.Function .*:Absent can be imported"),
        ("support.models.functions:Gelu#2", "no autograd.Function .*:Gelu#2 can be imported"),
        ("support.graphs:Gelu", "no autograd.Function .* can be imported; capture"),
        ("support.models.functions:function_model", "is no autograd.Function; name one"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(name: str, text: str) -> None:
    with pytest.raises(UnsupportedOpError, match=text):
        imported_function(name)
