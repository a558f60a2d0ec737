"""Parameters that cannot be captured: torch.export puts their names into Python code as they are,
one that a lazy module has not made yet has no shape, and those of TorchScript are not seen."""

from itertools import chain
from keyword import iskeyword

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from meshfold.errors import CaptureError


def refuse_names(model: nn.Module) -> None:
    """Raises CaptureError for a keyword of Python, or a line break, in the name of a parameter or
    buffer."""
    for name, _ in chain(model.named_parameters(), model.named_buffers()):
        part = next((p for p in name.split(".") if iskeyword(p) or not p.isprintable()), None)
        if part is not None:
            raise CaptureError(
                f"{name!r} has {part!r} in its name, which torch.export cannot write as Python; "
                "give that attribute another name",
                op=name,
            )


def refuse_lazy(model: nn.Module) -> None:
    """Raises CaptureError for a parameter or buffer that is made in the first forward, and for
    modules of TorchScript that have any."""
    for path, module in model.named_modules():
        if (
            isinstance(module, torch.jit.ScriptModule)
            and next(module.parameters(), None) is not None
        ):
            raise CaptureError(
                f"{path or type(module).__name__} is a module of TorchScript, whose parameters no "
                "trace sees; use the module that it was made of",
                op="torch.jit.ScriptModule",
            )
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise CaptureError(
                f"{name!r} of a lazy module is made in the first forward; run the model once, or "
                "build it with its sizes",
                op=name,
            )
