"""Names of the op graph and the torch objects they stand for.

"aten.linear.default"            torch.ops.aten.linear.default
"meshfold.expert_linear.default" torch.ops.meshfold.expert_linear.default
"package.module:Name"            a torch.autograd.Function
Symbol("dtype", "float32")       torch.float32
Symbol("layout", "strided")      torch.strided
Symbol("memory_format", ...)     torch.contiguous_format ...
Symbol("complex", "1j")          1j
Symbol("device", "cpu")          always the device of the rank that runs
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

import meshfold.ops.ctc_loss
import meshfold.ops.draws
import meshfold.ops.embedding_bag
import meshfold.ops.expert_dispatch
import meshfold.ops.expert_linear
import meshfold.ops.fused.gated_product
import meshfold.ops.fused.rms_norm
import meshfold.ops.value_checks
import meshfold.ops.vocab_parallel_cross_entropy  # noqa: F401  all define ops of namespace meshfold
from meshfold.errors import UnsupportedOpError
from meshfold.ir.custom_ops import is_function
from meshfold.ir.op_graph import Op
from meshfold.ops.functions import imported_function

_SWITCHES = ("train", "training")
_PROBABILITIES = ("p", "dropout", "dropout_p")


def op_function(op: Op) -> Callable[..., Any]:
    """What an op of a graph calls. Raises UnsupportedOpError, as torch_target."""
    known = op.custom.function if op.custom else None
    return known or torch_target(op.target)


def torch_target(name: str) -> Callable[..., Any]:
    """The torch op called `name` ("namespace.op.overload"), or the autograd.Function.

    Raises UnsupportedOpError if there is none.
    """
    if is_function(name):
        return imported_function(name)
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


def draws(target: str, args: Sequence[Any], kwargs: Sequence[tuple[str, Any]]) -> bool:
    """Whether an op draws random numbers from a generator, as its tag says: not if it is told that
    it does not train, or drops with probability 0."""
    named = "." in target and not is_function(target)
    function: Any = torch_target(target) if named else None
    if torch.Tag.nondeterministic_seeded not in getattr(function, "tags", ()):
        return False
    schema = function._schema.arguments
    given = {a.name: a.default_value for a in schema if a.has_default_value()}
    given |= dict(zip((a.name for a in schema), args, strict=False)) | dict(kwargs)
    is_off = any(given.get(name, True) is False for name in _SWITCHES)
    return not is_off and all(given.get(name, 1.0) != 0.0 for name in _PROBABILITIES)
