"""Names of torch's dtypes, layouts, memory formats and devices in the op graph."""

from typing import Any

import torch

from meshfold.ir.op_graph import Symbol


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """Inverse of dtype_name."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype), name
    return found


def symbol(
    value: torch.dtype | torch.device | torch.layout | torch.memory_format | complex,
) -> Symbol:
    """The name of a torch constant, or of a complex number, which JSON has none of."""
    kinds: dict[type, str] = {
        torch.dtype: "dtype",
        torch.layout: "layout",
        torch.memory_format: "memory_format",
    }
    if isinstance(value, torch.device):
        return Symbol("device", value.type)
    if isinstance(value, complex):
        return Symbol("complex", repr(value))
    return Symbol(kinds[type(value)], str(value).removeprefix("torch."))


def torch_constant(named: Symbol, device: torch.device) -> Any:
    """Inverse of symbol; every device is `device`, the one of the rank. Numbers of a microbatch are
    those of the first of microbatches with one target each."""
    if named.kind in _NUMBERS:
        return _NUMBERS[named.kind]
    if named.kind == "complex":
        return complex(named.text)
    return device if named.kind == "device" else getattr(torch, named.text)


_NUMBERS = {"microbatch": 0, "count": 1}
