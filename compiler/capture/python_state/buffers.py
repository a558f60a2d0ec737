"""Buffers that forward replaces by other tensors."""

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.export import ExportedProgram

from meshfold.errors import CaptureError
from meshfold.torch_compat.fake_tensors import is_fake


class Buffers:
    """The buffers of a model before forward, so that one that it replaces (`self.mean = ...`) is
    written instead: a graph knows writes to a buffer, not which tensor a name stands for."""

    def __init__(self, model: nn.Module) -> None:
        self._held = [
            (f"{path}.{name}".strip("."), module, name, buffer)
            for path, module in model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def remade(self) -> dict[str, str]:
        """The buffers that tensors of another shape or dtype have replaced, by name, with what is
        other."""
        return {
            label: f"{tuple(old.shape)} {_dtype(old)} by {tuple(new.shape)} {_dtype(new)}"
            for label, module, name, old in self._held
            if isinstance(new := module._buffers.get(name), torch.Tensor) and not alike(new, old)
        }

    def write_replaced(self) -> None:
        """Writes what has replaced buffers into them. Those of another shape or dtype stay."""
        replaced = [
            (module, name, buffer, new)
            for _, module, name, buffer in self._held
            if (new := module._buffers.get(name)) is not buffer
            and isinstance(new, torch.Tensor)
            and alike(new, buffer)
        ]
        # Read before any is written: buffers, or views of them, may have changed places.
        values = [new.detach().clone() for *_, new in replaced]
        for (module, name, buffer, _), value in zip(replaced, values, strict=True):
            buffer.copy_(value)
            module._buffers[name] = buffer


def alike(new: torch.Tensor, old: torch.Tensor) -> bool:
    return (new.shape, new.dtype) == (old.shape, old.dtype)


def _dtype(of: torch.Tensor) -> str:
    return str(of.dtype).removeprefix("torch.")


def refuse_remade(remade: Mapping[str, str], again: Callable[[], Mapping[str, str]]) -> None:
    """Raises CaptureError for a buffer that forward replaces by one of another dtype, or by one of
    another shape in its next call, too. A cache that grows once, to what the first call needs, is
    left. again: what the second call of another copy has replaced."""
    if not remade:
        return
    grows = again()
    for name, change in remade.items():
        (_, before), (_, after) = (side.rsplit(" ", 1) for side in change.split(" by "))
        if name in grows or before != after:
            raise CaptureError(
                f"forward replaces the buffer {name}, {change}, which no buffer of a graph can "
                "become; keep its shape and dtype, or pass what changes as an input tensor",
                op="nn.Module.register_buffer",
            )


def refuse_valueless(program: ExportedProgram) -> None:
    """Raises CaptureError for a tensor of the model that is neither in its state nor has values.
    (torch would go on, and read memory that is not there.)"""
    for name in program.graph_signature.lifted_tensor_constants:
        tensor = program.constants[name]
        if isinstance(tensor, torch.Tensor) and (tensor.is_meta or is_fake(tensor)):
            label = name.removeprefix("model.")
            raise CaptureError(
                f"{label} is a tensor without values that is no registered buffer; "
                "register it, or build the model on a real device",
                op=label,
            )
