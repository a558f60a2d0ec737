"""Writes into strided parts of a tensor, in ops whose gradient is right.

fill_diagonal_ and writes through as_strided become as_strided_scatter, of which torch (2.13) gives
the tensor that is written into the gradient of what is overwritten, and not of what stays:

    matrix.fill_diagonal_(-inf)     where(row == column, written, matrix)
    other strides                   scatter(matrix.view(-1), places, written.view(-1)).view(shape)
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from meshfold.errors import CaptureError
from meshfold.torch_compat.source_lines import line_in

_aten = torch.ops.aten
_SCATTER = _aten.as_strided_scatter.default


def write_strided_parts(graph: fx.Graph) -> None:
    """Rewrites as_strided_scatter in place. Raises CaptureError where the tensor that is written
    into is not contiguous, or one place is written twice."""
    for node in list(graph.nodes):
        if node.target is _SCATTER:
            with graph.inserting_before(node):
                node.replace_all_uses_with(_written(graph, node))
            graph.erase_node(node)


def _written(graph: fx.Graph, node: fx.Node) -> fx.Node:
    base, part, sizes, strides, *offsets = node.args
    assert isinstance(base, fx.Node) and isinstance(part, fx.Node)
    shape = base.meta["val"].shape
    size, stride = _numbers(sizes), _numbers(strides)
    (offset,) = _numbers([next(iter(offsets), None) or 0])
    memory = base.meta["val"]
    is_in_order = memory.is_contiguous() and memory.storage_offset() == 0
    if not is_in_order or not _are_apart(size, stride):
        raise CaptureError(
            f"{node.target} writes through strides into memory that is not in the order of its "
            "dims, or twice to one place; write it with scatter or torch.where",
            op=str(node.target),
            source=line_in(node.meta.get("stack_trace") or ""),
        )

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = graph.call_function(target, args, kwargs)
        made.meta = dict(node.meta)
        values = [a.meta["val"] if isinstance(a, fx.Node) else a for a in args]
        with base.meta["val"].fake_mode:
            made.meta["val"] = target(*values, **kwargs)
        return made

    def line(start: int, number: int, step: int) -> fx.Node:
        options = {"dtype": torch.int64, "device": base.meta["val"].device}
        return call(_aten.arange.start_step, start, start + number * step, step, **options)

    if len(shape) == 2 and (size, stride, offset) == ((shape[0],), (shape[1] + 1,), 0):
        rows = call(_aten.unsqueeze.default, line(0, shape[0], 1), 1)
        is_diagonal = call(_aten.eq.Tensor, rows, line(0, shape[1], 1))
        return call(_aten.where.self, is_diagonal, call(_aten.unsqueeze.default, part, 1), base)
    index = line(offset, size[-1], stride[-1])
    for number, width in reversed([*zip(size[:-1], stride[:-1], strict=True)]):
        outer = line(0, number, width)
        index = call(_aten.add.Tensor, call(_aten.unsqueeze.default, outer, 1), index)
        index = call(_aten.view.default, index, [-1])
    flat = call(_aten.view.default, base, [-1])
    new = call(_aten.scatter.src, flat, 0, index, call(_aten.reshape.default, part, [-1]))
    return call(_aten.view.default, new, list(shape))


def _are_apart(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether no two places are one: every stride is longer than all that is within it."""
    extent = 1
    for step, number in sorted(zip(stride, size, strict=True)):
        if number > 1 and step < extent:
            return False
        extent += step * (number - 1)
    return bool(size) and 0 not in size


def _numbers(values: Any) -> tuple[int, ...]:
    assert isinstance(values, Sequence)
    return tuple(int(value) for value in values)
