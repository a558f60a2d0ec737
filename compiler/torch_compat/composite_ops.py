"""What torch itself writes in other ops (composite ops): the one file that asks torch for it.

torch.export keeps such ops as they are called. One that no rule knows by its own name (hstack,
linalg.norm, prelu) is often made of ops that rules know.
"""

from collections.abc import Callable
from typing import Any

from torch import fx
from torch._export.utils import (
    _collect_all_valid_cia_ops,
    _get_decomp_for_cia,
    _is_preservable_cia_op,
)
from torch._ops import OpOverload

Decompositions = dict[Any, Callable[..., Any]]


def decompositions(module: fx.GraphModule, stays: Callable[[str], bool]) -> Decompositions:
    """A table for ExportedProgram.run_decompositions under which composite ops are written in what
    they are made of; empty if `module` calls none of them.

    stays: whether an op, by its name ("aten.hstack.default"), is to be kept as it is. An op may be
    made of composite ops in turn, so the table has all of torch's that do not stay.
    """
    called = {node.target for node in module.graph.nodes if node.op == "call_function"}
    # All of torch's ops take 25 ms to list: as much as a small layer takes to capture.
    if not any(_is_composite(op) and not stays(str(op)) for op in called):
        return {}
    ops = (op for op in _collect_all_valid_cia_ops() if not stays(str(op)))
    return {op: _get_decomp_for_cia(op) for op in ops}


def _is_composite(op: Any) -> bool:
    return isinstance(op, OpOverload) and _is_preservable_cia_op(op)
