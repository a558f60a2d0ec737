"""Names of parameters that torch.export cannot write: it puts them into Python code as they are."""

from itertools import chain
from keyword import iskeyword

from torch import nn

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
