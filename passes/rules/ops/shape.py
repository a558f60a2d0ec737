"""Rules of ops that move data without computing: views, permutations, slices, joins; and of those
that make tensors of one number.

All that move are linear. Sizes among their arguments are rewritten by passes.rules.localize.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from meshfold.passes.rules.ops.labels import (
    BoundOp,
    Dims,
    OpLabels,
    broadcast_dims,
    dim_label,
    numbered,
    rule,
)

_LINEAR = (frozenset({0}),)


def view_labels(source: Sequence[int], target: Sequence[int]) -> tuple[Dims, Dims]:
    """Labels of a view: dims whose products of sizes match form a group and share a label, each
    dim at its prefix in the group's index. [4, 6, 5] -> [24, 5] gives
    (a, 1) (a, 4) (b, 1) -> (a, 1) (b, 1)."""
    left: list[tuple[str, int] | None] = [None] * len(source)
    right: list[tuple[str, int] | None] = [None] * len(target)
    i = j = 0
    while i < len(source) and j < len(target):
        label = f"d{j}"
        a = b = 1
        while i < len(source) or j < len(target):
            # Take from the side that is behind; sizes of 1 at the end stay with their group.
            if i < len(source) and (a <= b or source[i] == 1):
                left[i] = dim_label(label, a)
                a *= source[i]
                i += 1
            elif j < len(target) and (b <= a or target[j] == 1):
                right[j] = dim_label(label, b)
                b *= target[j]
                j += 1
            if a == b and a > 1:
                break
    return tuple(left), tuple(right)


def _moved(inputs: tuple[Dims, ...], outputs: tuple[Dims, ...]) -> OpLabels:
    """Data that keeps its order along every label, padding and all."""
    names = frozenset(p[0] for dims in (*inputs, *outputs) for p in dims if p)
    return OpLabels(inputs, outputs, linear=_LINEAR, keeps_padding=names)


def _view(op: BoundOp) -> OpLabels | None:
    source, target = op.values[0].shape, op.outputs[0].shape
    if math.prod(source) == 0:
        return None
    left, right = view_labels(source, target)
    return _moved((left,), (right,))


def _expand(op: BoundOp) -> OpLabels:
    """New and widened dims: the same everywhere in, a shard out."""
    source, target = op.values[0].shape, op.outputs[0].shape
    labels = numbered(target)
    offset = len(target) - len(source)
    own = tuple(
        labels[offset + d] if target[offset + d] == n else None for d, n in enumerate(source)
    )
    return _moved((own,), (labels,))


def _broadcast(op: BoundOp) -> OpLabels:
    """Every tensor expanded to the shape of all."""
    shape = op.outputs[0].shape
    labels = numbered(shape)
    inputs = tuple(broadcast_dims(v.shape, shape, labels) for v in op.values)
    return OpLabels(inputs, (labels,) * len(op.outputs))


def _transpose(op: BoundOp) -> OpLabels:
    rank = len(op.values[0].shape)
    order = list(range(rank))
    a, b = (0, 1) if op.target == "aten.t.default" else (op.dim("dim0", rank), op.dim("dim1", rank))
    if rank > 1:
        order[a], order[b] = order[b], order[a]
    labels = numbered(op.values[0].shape)
    return _moved((labels,), (tuple(labels[d] for d in order),))


def _permute(op: BoundOp) -> OpLabels:
    labels = numbered(op.values[0].shape)
    order = [d % len(labels) for d in op.integers("dims")]
    return _moved((labels,), (tuple(labels[d] for d in order),))


def _unsqueeze(op: BoundOp) -> OpLabels:
    labels = numbered(op.values[0].shape)
    dim = op.dim("dim", len(labels) + 1)
    return _moved((labels,), ((*labels[:dim], None, *labels[dim:]),))


def _squeeze(op: BoundOp) -> OpLabels:
    """Dims of size 1 go; others named by `dim` stay, even where their local shard has size 1."""
    shape = op.values[0].shape
    named = op.integers("dim") if op.target != "aten.squeeze.default" else range(len(shape))
    gone = {d % max(len(shape), 1) for d in named if shape and shape[d] == 1}
    odd = any(shape[d] != 1 for d in named) if shape else False
    labels = numbered(shape)
    out = tuple(p for d, p in enumerate(labels) if d not in gone)
    return replace(_moved((labels,), (out,)), local="reshape" if odd else "plain")


def _select(op: BoundOp) -> OpLabels:
    rank = len(op.values[0].shape)
    dim = op.dim("dim", rank)
    labels = numbered(op.values[0].shape, but=(dim,))
    return _moved((labels,), ((*labels[:dim], *labels[dim + 1 :]),))


def _slice(op: BoundOp) -> OpLabels:
    """A dim that is unsharded keeps its label."""
    source, target = op.values[0].shape, op.outputs[0].shape
    labels = numbered(source, but=[d for d, n in enumerate(source) if n != target[d]])
    return _moved((labels,), (labels,))


def _reorder(op: BoundOp) -> OpLabels:
    """flip, roll, rot90: the dims named are unsharded; all if none is named."""
    shape = op.values[0].shape
    labels = numbered(shape, but=[d % len(shape) for d in op.integers("dims")] or range(len(shape)))
    return OpLabels((labels,), (labels,), linear=_LINEAR)


def _triangle(op: BoundOp) -> OpLabels:
    """tril, triu: the last two dims unsharded."""
    rank = len(op.values[0].shape)
    labels = numbered(op.values[0].shape, but=(rank - 2, rank - 1))
    return OpLabels((labels,), (labels,), linear=_LINEAR)


def _pad(op: BoundOp) -> OpLabels:
    """Padded dims unsharded, those too that lose as much at one end as they get at the other.
    Padding with zeros is linear."""
    source, pad = op.values[0].shape, op.integers("pad")
    padded = [len(source) - 1 - k // 2 for k, amount in enumerate(pad) if amount != 0]
    labels = numbered(source, but=padded)
    zeros = op.get("mode", "constant") == "constant" and not op.get("value")
    return OpLabels((labels,), (labels,), linear=_LINEAR if zeros else ())


def _cat(op: BoundOp) -> OpLabels:
    """Equal operands: their number is the highest digit of the joined dim. Unequal ones:
    unsharded."""
    out = op.outputs[0].shape
    dim = op.dim("dim", len(out))
    shapes = [v.shape for v in op.values]
    together = (frozenset(range(len(shapes))),)
    labels = numbered(out, but=(dim,))
    # Old torch code may pass empty one-dim tensors, which join nothing.
    if any(len(s) != len(out) for s in shapes) or len({s[dim] for s in shapes}) > 1:
        dims = tuple(labels if len(s) == len(out) else (None,) for s in shapes)
        return replace(_moved(dims, (labels,)), linear=together)
    one = (*labels[:dim], dim_label(f"d{dim}", len(shapes)), *labels[dim + 1 :])
    joined = (*labels[:dim], dim_label(f"d{dim}"), *labels[dim + 1 :])
    return replace(_moved((one,) * len(shapes), (joined,)), linear=together)


def _stack(op: BoundOp) -> OpLabels:
    out = op.outputs[0].shape
    dim = op.dim("dim", len(out))
    labels = numbered(op.values[0].shape)
    together = (frozenset(range(len(op.values))),)
    found = _moved((labels,) * len(op.values), ((*labels[:dim], None, *labels[dim:]),))
    return replace(found, linear=together)


def _split(op: BoundOp) -> OpLabels:
    """The reverse of cat: equal results share the split dim, unequal ones need it unsharded."""
    shape = op.values[0].shape
    dim = op.dim("dim", len(shape))
    sizes = [v.shape[dim] for v in op.outputs]
    labels = numbered(shape, but=(dim,))
    if len(set(sizes)) > 1 or sum(sizes) != shape[dim]:
        return _moved((labels,), (labels,) * len(sizes))
    one = (*labels[:dim], dim_label(f"d{dim}", len(sizes)), *labels[dim + 1 :])
    joined = (*labels[:dim], dim_label(f"d{dim}"), *labels[dim + 1 :])
    return _moved((joined,), (one,) * len(sizes))


def _diagonal(op: BoundOp) -> OpLabels:
    """The two dims that meet, unsharded, become a last one."""
    rank = len(op.values[0].shape)
    pair = {op.dim("dim1", rank, 0), op.dim("dim2", rank, 1)}
    labels = numbered(op.values[0].shape, but=tuple(pair))
    return _moved((labels,), ((*(p for d, p in enumerate(labels) if d not in pair), None),))


def _diagonal_of(op: BoundOp) -> OpLabels | None:
    """diag_embed: the last dim, unsharded, becomes the last two."""
    rank = len(op.outputs[0].shape)
    if {op.dim("dim1", rank, -2), op.dim("dim2", rank, -1)} != {rank - 2, rank - 1}:
        return None
    labels = numbered(op.values[0].shape, but=(rank - 2,))
    return _moved((labels,), ((*labels, None),))


def _gated(op: BoundOp) -> OpLabels:
    """glu: the halves of a dim meet, so a shard has its part of both."""
    shape = op.values[0].shape
    dim = op.dim("dim", len(shape), -1)
    labels = numbered(shape)
    half = (*labels[:dim], dim_label(f"d{dim}", 2), *labels[dim + 1 :])
    return OpLabels((labels,), (half,))


def _unbind(op: BoundOp) -> OpLabels:
    shape = op.values[0].shape
    dim = op.dim("dim", len(shape))
    labels = numbered(shape, but=(dim,))
    out = (*labels[:dim], *labels[dim + 1 :])
    return _moved((labels,), (out,) * len(op.outputs))


def _repeat_interleave(op: BoundOp) -> OpLabels:
    """Each entry of `dim` several times in a row: the copy is the lowest digit."""
    shape = op.values[0].shape
    if op.get("dim") is None:  # of the flattened tensor
        return OpLabels(((None,) * len(shape),), ((None,),), linear=_LINEAR)
    dim = op.dim("dim", len(shape))
    labels = numbered(op.outputs[0].shape)
    # Of one entry there are copies alone, of which a rank makes its own.
    source = None if shape[dim] == 1 else labels[dim]
    return _moved(((*labels[:dim], source, *labels[dim + 1 :]),), (labels,))


def _repeat(op: BoundOp) -> OpLabels:
    """Copies side by side: the copy is the highest digit of a dim."""
    source, target = op.values[0].shape, op.outputs[0].shape
    offset = len(target) - len(source)
    labels = numbered(target, but=range(offset))
    own = tuple(
        dim_label(f"d{offset + d}", target[offset + d] // n if n else 1)
        for d, n in enumerate(source)
    )
    return OpLabels((own,), (labels,), linear=_LINEAR)


def _replaced_slice(op: BoundOp) -> OpLabels:
    """slice_scatter: the dim that is written to is unsharded."""
    shape = op.value("self").shape
    labels = numbered(shape, but=(op.dim("dim", len(shape)),))
    return OpLabels((labels, labels), (labels,), linear=(frozenset({0, 1}),))


def _replaced_row(op: BoundOp) -> OpLabels:
    """select_scatter: src lacks the dim that is written to."""
    shape = op.value("self").shape
    dim = op.dim("dim", len(shape))
    labels = numbered(shape, but=(dim,))
    return OpLabels(
        (labels, (*labels[:dim], *labels[dim + 1 :])), (labels,), linear=(frozenset({0, 1}),)
    )


def _constant(op: BoundOp) -> OpLabels:
    """full, zeros, ones: every rank can make its shard."""
    labels = numbered(op.outputs[0].shape)
    return OpLabels((), (labels,), keeps_padding=frozenset(p[0] for p in labels if p))


_CONSTANT = "size dtype layout device pin_memory"


def _check(op: BoundOp) -> OpLabels:
    """x [...], condition [] -> x: every rank sees the whole condition, so that all of them raise"""
    labels = numbered(op.value("x").shape)
    condition: Dims = (None,) * len(op.value("condition").shape)
    return _moved((labels, condition), (labels,))


SHAPE_RULES = {
    "meshfold.check.default": rule("x condition holds text", _check),
    "aten.view.default": rule("self size", _view),
    "aten._unsafe_view.default": rule("self size", _view),
    "aten.reshape.default": rule("self shape", _view),
    "aten.unflatten.int": rule("self dim sizes", _view),
    "aten.flatten.using_ints": rule("self start_dim end_dim", _view),
    "aten.expand.default": rule("self size implicit", _expand),
    "aten.broadcast_tensors.default": rule("tensors", _broadcast),
    "aten.t.default": rule("self", _transpose),
    "aten.transpose.int": rule("self dim0 dim1", _transpose),
    "aten.permute.default": rule("self dims", _permute),
    "aten.unsqueeze.default": rule("self dim", _unsqueeze),
    "aten.squeeze.default": rule("self", _squeeze),
    "aten.squeeze.dim": rule("self dim", _squeeze),
    "aten.squeeze.dims": rule("self dim", _squeeze),
    "aten.select.int": rule("self dim index", _select),
    "aten.slice.Tensor": rule("self dim start end step", _slice),
    "aten.flip.default": rule("self dims", _reorder),
    "aten.rot90.default": rule("self k dims", _reorder),
    "aten.roll.default": rule("self shifts dims", _reorder),
    "aten.tril.default": rule("self diagonal", _triangle),
    "aten.triu.default": rule("self diagonal", _triangle),
    "aten.pad.default": rule("self pad mode value", _pad),
    "aten.constant_pad_nd.default": rule("self pad value", _pad),
    "aten.cat.default": rule("tensors dim", _cat),
    "aten.stack.default": rule("tensors dim", _stack),
    "aten.split.Tensor": rule("self split_size dim", _split),
    "aten.diagonal.default": rule("self offset dim1 dim2", _diagonal),
    "aten.diag_embed.default": rule("self offset dim1 dim2", _diagonal_of),
    "aten.split_with_sizes.default": rule("self split_sizes dim", _split),
    "aten.chunk.default": rule("self chunks dim", _split),
    "aten.glu.default": rule("self dim", _gated),
    "aten.unbind.int": rule("self dim", _unbind),
    "aten.repeat_interleave.self_int": rule("self repeats dim output_size", _repeat_interleave),
    "aten.repeat.default": rule("self repeats", _repeat),
    "aten.slice_scatter.default": rule("self src dim start end step", _replaced_slice),
    "aten.select_scatter.default": rule("self src dim index", _replaced_row),
    "aten.zeros.default": rule(_CONSTANT, _constant),
    "aten.ones.default": rule(_CONSTANT, _constant),
    "aten.full.default": rule(_CONSTANT.replace("size", "size fill_value"), _constant),
}
