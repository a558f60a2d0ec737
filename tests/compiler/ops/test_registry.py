"""Names of torch objects and back."""

import pytest
import torch

from meshfold.errors import UnsupportedOpError
from meshfold.ops.registry import draws, torch_target
from meshfold.torch_compat.dtypes import dtype_name, symbol, torch_constant, torch_dtype


def test_targets() -> None:
    assert torch_target("aten.linear.default") is torch.ops.aten.linear.default
    for name in ("aten.no_such_op.default", "aten.linear.nope", "nowhere.linear.default"):
        with pytest.raises(UnsupportedOpError, match="has no op") as caught:
            torch_target(name)
        assert caught.value.op == name
    with pytest.raises(UnsupportedOpError, match="names no op"):
        torch_target("aten")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_dtypes(dtype: torch.dtype) -> None:
    assert torch_dtype(dtype_name(dtype)) is dtype
    assert torch_constant(symbol(dtype), torch.device("cpu")) is dtype


def test_constants() -> None:
    meta = torch.device("meta")
    for value in (torch.strided, torch.contiguous_format, torch.channels_last):
        assert torch_constant(symbol(value), meta) is value
    assert torch_constant(symbol(torch.device("cuda", 3)), meta) is meta


def test_an_op_draws_as_its_tag_and_its_arguments_say() -> None:
    assert draws("aten.rand.default", ((4,),), ())
    assert draws("aten.dropout.default", (0, 0.5, True), ())
    assert not draws("aten.dropout.default", (0, 0.5, False), ())
    assert not draws("aten.scaled_dot_product_attention.default", (0, 1, 2), ())
    assert draws("aten.scaled_dot_product_attention.default", (0, 1, 2), (("dropout_p", 0.1),))
    assert not draws("aten.rrelu.default", (0, 0.1, 0.3, False), ())
    assert not draws("aten.add.Tensor", (0, 1), ())
