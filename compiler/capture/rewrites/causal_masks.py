"""Masks that say nothing but "causal", or nothing at all, leave the program.

Hugging Face hands attention a mask [batch, 1, rows, keys] of flags even where nobody asked for one:
computed from positions, from nothing that is in the batch. Where such a mask equals the lower
triangle, attention is causal by itself: fused kernels skip half of the work, a ring skips blocks,
and no mask is kept. Where all flags are set, there is none.

What a mask holds is proven, from its constants up:

    small values     computed, every number of them; large ones by their first row, where all rows
                     are the same and the op does the same to each
    large flags      known as a pattern, ALL or CAUSAL; by ops that keep one, and by comparisons of
                     a column of numbers with a row of them:  keys[t] <= rows[s]  is CAUSAL if keys
                     never fall and rows[i] has exactly the keys up to i on its side

Anything else (a window, a boundary between documents, a mask from the batch, or from a buffer,
which may change) is not known, and the mask is not rewritten.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum

import torch
from torch import Tensor

from meshfold.capture.rewrites.known_values import computed, known_values
from meshfold.capture.trace.raw_program import Key, Operand, RawArg, RawOp, RawProgram

ATTENTION = "aten.scaled_dot_product_attention.default"
_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")

LARGEST = 2**22
"""Numbers of a value that is computed."""


class Pattern(Enum):
    """Flags of the last two dims, the same for all others."""

    ALL = "all"
    CAUSAL = "causal"


Known = Tensor | Pattern

_KEEPS = frozenset(
    f"aten.{name}.default" for name in ("expand", "unsqueeze", "clone", "alias", "detach")
)
"""Ops that repeat flags, if the last two dims stay."""

_ROW_BY_ROW = frozenset(
    f"aten.{name}"
    for name in (
        "expand.default reshape.default slice.Tensor diff.default cumsum.default ne.Scalar "
        "eq.Scalar add.Tensor sub.Tensor mul.Tensor"
    ).split()
)
"""Ops that make each row, along the first dim, of the same row of what they read."""

_DIM_OF_ROWS = {
    "aten.slice.Tensor": (1, 0),
    "aten.diff.default": (2, -1),
    "aten.cumsum.default": (1, 0),
}
"""Where such an op says the dim that it works along, and what it is if it does not."""

_SIZES = frozenset({"aten.expand.default", "aten.reshape.default"})

_AND = frozenset({"aten.__and__.Tensor", "aten.bitwise_and.Tensor", "aten.logical_and.default"})
_MIRRORED = {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt", "eq": "eq"}
_COMPARES = {f"aten.{name}.Tensor": name for name in _MIRRORED}


def plain_masks(program: RawProgram) -> RawProgram:
    """`program` whose attention has no mask that is_causal, or nothing, says as well."""
    masks = {m.key: None for op in program.ops if (m := _mask(op)) is not None}
    if not masks:
        return program
    known = known_values(program, list(masks), _made)
    ops = [_without_mask(op, program, known) for op in program.ops]
    return replace(program, ops=ops)


def _mask(op: RawOp) -> Operand | None:
    """The mask of an attention that has one."""
    found = named_arguments(op).get("attn_mask") if op.target == ATTENTION else None
    return found if isinstance(found, Operand) else None


def named_arguments(op: RawOp) -> dict[str, RawArg]:
    """The arguments of an attention by name."""
    return dict(zip(_PARAMETERS, op.args, strict=False)) | dict(op.kwargs)


def _without_mask(op: RawOp, program: RawProgram, known: Mapping[Key, Known]) -> RawOp:
    mask = _mask(op)
    if mask is None or program.values[mask.key].dtype != "bool":
        return op
    given = named_arguments(op)
    rows, keys = (program.values[given[name].key].shape[-2] for name in ("query", "key"))
    # One flag for all keys, or rows, is broadcast: no triangle of this attention.
    is_square = rows == keys and program.values[mask.key].shape[-2:] == (rows, keys)
    pattern = _pattern(known.get(mask.key))
    if pattern is Pattern.CAUSAL and not is_square:
        return op
    if pattern is None or given.get("is_causal", False):
        return op
    rest = {k: v for k, v in given.items() if k not in ("query", "key", "value", "attn_mask")}
    if pattern is Pattern.CAUSAL:
        rest["is_causal"] = True
    return replace(op, args=op.args[:3], kwargs=tuple(rest.items()))


def _made(op: RawOp, program: RawProgram, known: Mapping[Key, Known]) -> Known | None:
    result = program.values[op.outputs[0]]
    operands = [known[key] for key in op.operands]
    tensors = [x for x in operands if isinstance(x, Tensor)]
    if len(tensors) == len(operands):
        if (repeated := _by_first_row(op, result.shape, known)) is not None:
            return repeated
        if math.prod(result.shape) <= LARGEST:
            return computed(op, known)
    if op.target in _KEEPS:
        (source,) = op.operands
        same = program.values[source].shape[-2:] == result.shape[-2:]
        return _pattern(operands[0]) if same else None
    if op.target in _AND:
        return _both(*map(_pattern, operands))
    if op.target in _COMPARES and len(tensors) == 2:
        return _compared(_COMPARES[op.target], *tensors)
    return None


def _by_first_row(op: RawOp, shape: tuple[int, ...], known: Mapping[Key, Known]) -> Tensor | None:
    """What an op makes of operands whose rows are all the same, from one of them; expanded, so it
    takes the memory of a row. None where rows may differ."""
    if op.target not in _ROW_BY_ROW or _works_along_rows(op, len(shape)):
        return None
    if len(shape) < 2 or shape[0] < 2 or math.prod(shape[1:]) > LARGEST:
        return None
    rows: dict[Key, Known] = {}
    is_reshaped = op.target == "aten.reshape.default"
    for key in op.operands:
        tensor = known[key]
        if not isinstance(tensor, Tensor):
            return None
        if tensor.dim() == len(shape) or is_reshaped:
            if tensor.dim() < 1 or (is_reshaped and tensor.shape[0] != shape[0]):
                return None
            if tensor.shape[0] != 1 and tensor.stride(0) != 0:
                return None
            tensor = tensor[:1]
        rows[key] = tensor
    if op.target in _SIZES:
        sizes = op.args[1] if len(op.args) > 1 else None
        if not isinstance(sizes, tuple) or not sizes or sizes[0] != shape[0]:
            return None
        op = replace(op, args=(op.args[0], (1, *sizes[1:]), *op.args[2:]))
    row = computed(op, rows)
    if row is None or row.shape != (1, *shape[1:]):
        return None
    return row.expand(shape)


def _works_along_rows(op: RawOp, num_dims: int) -> bool:
    """Whether the dim that an op names is the first, or not known."""
    if op.target not in _DIM_OF_ROWS:
        return False
    place, default = _DIM_OF_ROWS[op.target]
    named = dict(op.kwargs).get("dim", op.args[place] if len(op.args) > place else default)
    return not isinstance(named, int) or named % num_dims == 0


def _pattern(known: Known | None) -> Pattern | None:
    """What flags say."""
    if not isinstance(known, Tensor):
        return known
    if known.dtype != torch.bool:
        return None
    if bool(known.all()):
        return Pattern.ALL
    if known.dim() < 2 or known.shape[-1] != known.shape[-2]:
        return None
    size = known.shape[-1]
    triangle = torch.ones(size, size, dtype=torch.bool).tril()
    return Pattern.CAUSAL if bool((known == triangle).all()) else None


def _both(left: Pattern | None, right: Pattern | None) -> Pattern | None:
    """Where both flags are set."""
    if left is None or right is None:
        return None
    return Pattern.ALL if left is right is Pattern.ALL else Pattern.CAUSAL


def _compared(name: str, left: Tensor, right: Tensor) -> Pattern | None:
    """The comparison of left with right, which are broadcast to large flags."""
    left, right = (_without_repeats(x) for x in (left, right))
    ends = [(x.min(), x.max()) for x in (left, right)]
    compare = getattr(torch, name)
    if all(bool(compare(a, b)) for a in ends[0] for b in ends[1]):
        # Between its ends a comparison that holds at all of them holds; equal ends are all equal.
        return Pattern.ALL
    if left.dim() < 2 or right.dim() < 2:
        return None
    if left.shape[-2] == 1 and right.shape[-1] == 1:
        return _triangle(name, keys=left, rows=right)
    if right.shape[-2] == 1 and left.shape[-1] == 1:
        return _triangle(_MIRRORED[name], keys=right, rows=left)
    return None


def _without_repeats(tensor: Tensor) -> Tensor:
    """One of what is expanded along a dim."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _triangle(name: str, *, keys: Tensor, rows: Tensor) -> Pattern | None:
    """Whether keys [..., 1, t] compared with rows [..., s, 1] are CAUSAL; the same for all dims in
    front."""
    line, column = (_only_one(x) for x in (keys.squeeze(-2), rows.squeeze(-1)))
    if name not in ("le", "lt") or line is None or column is None:
        return None
    if line.shape != column.shape or line.dtype != column.dtype:
        return None
    if bool((line[1:] < line[:-1]).any()):
        return None
    counts = torch.searchsorted(line.contiguous(), column.contiguous(), right=name == "le")
    wanted = torch.arange(1, len(line) + 1)
    return Pattern.CAUSAL if torch.equal(counts, wanted) else None


def _only_one(lines: Tensor) -> Tensor | None:
    """The last dim where all others repeat it."""
    flat = lines.reshape(-1, lines.shape[-1])
    return flat[0] if bool((flat == flat[:1]).all()) else None
