"""The names that parameters and buffers have before the first call of forward, which may give them
others: what a later call reads is told by these."""

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

_OF_STATE = (InputKind.PARAMETER, InputKind.BUFFER)


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """By all of their names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


class FirstNames:
    """Of the tensors of a module as they are now."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = _tensors(module)

    def moved(self) -> dict[str, str]:
        """The name that each tensor had, by the one under which another was."""
        first: dict[int, str] = {}
        for name, tensor in self._before.items():
            first.setdefault(id(tensor), name)
        return {
            name: first[id(tensor)]
            for name, tensor in _tensors(self._module).items()
            if self._before.get(name) is not tensor and id(tensor) in first
        }


def restore_names(program: ExportedProgram, moved: dict[str, str]) -> None:
    """Names what a program reads and writes as it was named first."""
    signature = program.graph_signature
    inputs = (spec for spec in signature.input_specs if spec.kind in _OF_STATE)
    for spec in (*inputs, *signature.output_specs):
        if spec.target is not None and spec.target in moved:
            spec.target = moved[spec.target]
