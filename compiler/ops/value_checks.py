"""The op check: a tensor goes on as it is if a condition holds, else the step ends in an error.

An assertion of the model that is run at step time (value_checks="run" of CompileOptions). Every
rank reads the whole condition, so that all of them raise or none.
"""

from typing import Any

import torch
from torch import Tensor

from meshfold.errors import ValueCheckError

CHECK = "meshfold.check.default"


def _checked(x: Tensor, condition: Tensor, holds: bool, text: str) -> Tensor:
    """x itself; condition has one element, which is to be as true as `holds` says.

    Raises ValueCheckError, naming the assertion, if it is not.
    """
    if bool(condition) != holds:
        raise ValueCheckError(
            f"a check of values fails ({text}); look at this batch, or leave checks out with "
            "CompileOptions(value_checks='drop')"
        )
    return x.clone()


def _fake_checked(x: Tensor, condition: Tensor, holds: bool, text: str) -> Tensor:
    return torch.empty_like(x)


def _backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    return gradient, None, None, None


torch.library.define(
    "meshfold::check", "(Tensor x, Tensor condition, bool holds, str text) -> Tensor"
)
torch.library.impl("meshfold::check", "CompositeExplicitAutograd", _checked)
torch.library.register_fake("meshfold::check", _fake_checked)
torch.library.register_autograd("meshfold::check", _backward)


def checked(x: Tensor, condition: Tensor, holds: bool, text: str) -> Tensor:
    """Put the op into a graph that is being traced."""
    result: Tensor = torch.ops.meshfold.check(x, condition, holds, text)
    return result
