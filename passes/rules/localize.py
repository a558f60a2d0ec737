"""Global sizes among an op's arguments, rewritten to the sizes of one rank.

Every rank's result has the local shape of the output's layout; sizes follow from that alone. Ops
not named here have no argument that depends on a sharded dim. Rows dispatched to their experts, or
back, are told so by an argument more: the load of the busiest rank. Blocks of rows that come in a
ring are those that a rank sees, which other axes may have split.
"""

import sys
from collections.abc import Callable, Sequence

from meshfold.ir.op_graph import DRAWS, Arg, Op, OpGraph
from meshfold.ir.spmd import local_shape
from meshfold.ir.strategy import OpTyping
from meshfold.passes.rules.ops.collective_matmul import COLLECTIVE_MATMUL_RULES, ring_of
from meshfold.passes.rules.ops.experts import DISPATCH_OPS, EXPERT_LOAD, has_dispatched_rows

Arguments = dict[str, Arg]
Shapes = list[tuple[int, ...]]
Rewrite = Callable[[Arguments, Shapes, Shapes], Arguments]
"""(arguments by name, local and global shapes of the outputs) -> local arguments."""


def localize(
    graph: OpGraph, op_index: int, typing: OpTyping, sizes: Sequence[int]
) -> tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
    """(args, kwargs) of an op for one rank of axes of `sizes`. References stay as they are."""
    op = graph.ops[op_index]
    if op.target in DISPATCH_OPS and has_dispatched_rows(typing):
        return (*op.args, EXPERT_LOAD), op.kwargs
    if op.target in COLLECTIVE_MATMUL_RULES:
        return _with_local_blocks(op, typing, sizes), op.kwargs
    row = _ROWS.get(op.target)
    if row is None:
        return op.args, op.kwargs
    names, function = row
    full_shapes = [graph.values[v].shape for v in op.outputs]
    locals_ = [
        local_shape(shape, layout, sizes)
        for shape, layout in zip(full_shapes, typing.outputs, strict=True)
    ]
    given = dict(zip(names.split(), op.args, strict=False))
    new = function({**given, **dict(op.kwargs)}, locals_, full_shapes)
    args = tuple(new[name] for name in given)
    return args, tuple((name, new[name]) for name, _ in op.kwargs)


def _with_local_blocks(op: Op, typing: OpTyping, sizes: Sequence[int]) -> tuple[Arg, ...]:
    """Arguments of products in a ring; as they are where no axis has their rows in one."""
    ring = ring_of(op, typing, sizes)
    if ring is None:
        return op.args
    x, weights, biases, dim, blocks, *rest = op.args
    assert isinstance(blocks, tuple)
    return x, weights, biases, dim, (ring[1], *blocks[1:]), *rest


def _images(arguments: Arguments, shapes: Shapes, _: Shapes) -> Arguments:
    """affine_grid_generator: images [n, c, places] of a grid [n, places, coordinates]."""
    size = arguments["size"]
    assert isinstance(size, tuple)
    return {**arguments, "size": (shapes[0][0], *size[1:])}


def _size(name: str) -> Rewrite:
    def rewrite(arguments: Arguments, shapes: Shapes, _: Shapes) -> Arguments:
        return {**arguments, name: shapes[0]}

    return rewrite


def _unflatten(arguments: Arguments, shapes: Shapes, _: Shapes) -> Arguments:
    dim, sizes = arguments["dim"], arguments["sizes"]
    assert isinstance(dim, int) and isinstance(sizes, tuple)
    if dim < 0:
        dim += len(shapes[0]) - len(sizes) + 1
    return {**arguments, "sizes": shapes[0][dim : dim + len(sizes)]}


def _split(arguments: Arguments, shapes: Shapes, _: Shapes) -> Arguments:
    """One size, or one per result. The last result may be the smaller one."""
    dim = arguments.get("dim", 0)
    assert isinstance(dim, int)
    sizes = tuple(shape[dim] for shape in shapes)
    if "split_size" in arguments:
        return {**arguments, "split_size": sizes[0]}
    return {**arguments, "split_sizes": sizes}


def _slice(arguments: Arguments, shapes: Shapes, full_shapes: Shapes) -> Arguments:
    """Only a slice of everything may be of a sharded dim: it goes to the end."""
    dim = arguments.get("dim", 0)
    assert isinstance(dim, int)
    if shapes[0][dim] == full_shapes[0][dim] or "end" not in arguments:
        return arguments
    return {**arguments, "end": sys.maxsize}


def _repeat_interleave(arguments: Arguments, shapes: Shapes, full_shapes: Shapes) -> Arguments:
    dim = arguments.get("dim")
    if dim is None:
        return arguments
    assert isinstance(dim, int)
    new = dict(arguments)
    if full_shapes[0][dim] == arguments["repeats"]:  # of one entry
        new["repeats"] = shapes[0][dim]
    if arguments.get("output_size") is not None:
        new["output_size"] = shapes[0][dim]
    return new


def _groups(name: str) -> Rewrite:
    """Groups of channels: a rank has as large a part of them as of the channels, dim 1."""

    def rewrite(arguments: Arguments, shapes: Shapes, full_shapes: Shapes) -> Arguments:
        groups = arguments.get(name, 1)
        assert isinstance(groups, int)
        if groups == 1:
            return arguments
        return {**arguments, name: groups * shapes[0][1] // full_shapes[0][1]}

    return rewrite


_CONVOLUTION = "input weight bias stride padding dilation groups"
_TRANSPOSED = "input weight bias stride padding output_padding groups dilation"

_ROWS: dict[str, tuple[str, Rewrite]] = {
    "aten.affine_grid_generator.default": ("theta size align_corners", _images),
    "aten.unfold_backward.default": (
        "grad_in input_sizes dim size step",
        _size("input_sizes"),
    ),
    "aten.view.default": ("self size", _size("size")),
    "aten._unsafe_view.default": ("self size", _size("size")),
    "aten.reshape.default": ("self shape", _size("shape")),
    "aten.expand.default": ("self size implicit", _size("size")),
    **{f"aten.{name}.default": ("size", _size("size")) for name in ("zeros", "ones")},
    "aten.full.default": ("size fill_value", _size("size")),
    **{name: ("size dtype device alike", _size("size")) for name in DRAWS},
    "aten.unflatten.int": ("self dim sizes", _unflatten),
    "aten.split.Tensor": ("self split_size dim", _split),
    "aten.split_with_sizes.default": ("self split_sizes dim", _split),
    "aten.slice.Tensor": ("self dim start end step", _slice),
    **{
        f"aten.conv{n}d.{overload}": (_CONVOLUTION, _groups("groups"))
        for n in (1, 2, 3)
        for overload in ("default", "padding")
    },
    "aten.conv_transpose1d.default": (_TRANSPOSED, _groups("groups")),
    "aten.conv_transpose2d.input": (_TRANSPOSED, _groups("groups")),
    "aten.conv_transpose3d.input": (_TRANSPOSED, _groups("groups")),
    "aten.group_norm.default": (
        "input num_groups weight bias eps cudnn_enabled",
        _groups("num_groups"),
    ),
    "aten.repeat_interleave.self_int": ("self repeats dim output_size", _repeat_interleave),
}
