"""Names of the op graph and the torch objects they stand for.

"aten.linear.default"            torch.ops.aten.linear.default
"meshfold.expert_linear.default" torch.ops.meshfold.expert_linear.default
Symbol("dtype", "float32")       torch.float32
Symbol("layout", "strided")      torch.strided
Symbol("memory_format", ...)     torch.contiguous_format ...
Symbol("device", "cpu")          always the device of the rank that runs
"""

from collections.abc import Callable
from typing import Any

import torch

import meshfold.ops.draws
import meshfold.ops.expert_dispatch
import meshfold.ops.expert_linear  # noqa: F401  all define ops of namespace meshfold
from meshfold.errors import UnsupportedOpError


def torch_target(name: str) -> Callable[..., Any]:
    """The torch op called `name` ("namespace.op.overload").

    Raises UnsupportedOpError if this torch has no such op.
    """
    found: Any = torch.ops
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except (AttributeError, RuntimeError) as error:
            raise UnsupportedOpError(
                f"torch {torch.__version__} has no op {name}; import the package that defines it, "
                "or capture again with this torch",
                op=name,
            ) from error
    if not callable(found):
        raise UnsupportedOpError(f"{name} names no op; write namespace.op.overload", op=name)
    return found  # type: ignore[no-any-return]
