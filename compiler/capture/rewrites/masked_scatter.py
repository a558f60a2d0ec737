"""Rows that a mask puts among others (masked_scatter) become ops that ranks can share.

    masked_scatter(x[..., d], mask[..., 1] expanded, rows[..., d])

gives row k of `rows` to the k-th position of the mask, as features of images take the positions of
their tokens in a text. How many positions come before one depends on the full batch, so that

    place = cumsum(mask) - 1                      along all tokens, which ranks do together
    taken = index_select(rows, place)             any row where the mask is not set
    where(mask, taken, x)

A mask that differs along d is not rewritten: that op has no rule.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshfold.capture.trace.raw_program import Key, Operand, RawArg, RawOp, RawProgram
from meshfold.ir.op_graph import Source, Symbol, Value

SCATTER = "aten.masked_scatter.default"
_EXPAND = "aten.expand.default"
_DEVICE = Symbol("device", "cpu")
"""Stands for the rank's."""


def share_scatters(program: RawProgram) -> RawProgram:
    """`program` without masked_scatter of full rows."""
    makers: dict[Key, RawOp] = {key: op for op in program.ops for key in op.outputs}
    values = dict(program.values)
    ops: list[RawOp] = []
    for op in program.ops:
        mask = _mask_of_rows(op, makers, values)
        ops += [op] if mask is None else _Scatter(op, mask, values).ops()
    return replace(program, ops=ops, values=values)


def _mask_of_rows(op: RawOp, makers: dict[Key, RawOp], values: dict[Key, Value]) -> Key | None:
    """The mask [..., 1] that says which rows are replaced; None for another op or mask."""
    if op.target != SCATTER:
        return None
    x, mask, source = (arg.key for arg in op.args)
    shape = values[x].shape
    maker = makers.get(mask)
    if maker is not None and maker.target == _EXPAND:
        mask = maker.args[0].key
    narrow = values[mask].shape == (*shape[:-1], 1)
    rows = len(shape) > 1 and values[source].shape[-1:] == shape[-1:]
    return mask if narrow and rows and 0 not in values[source].shape else None


@dataclass
class _Scatter:
    """The ops in place of `scatter`; `values` takes what they make."""

    scatter: RawOp
    mask: Key
    values: dict[Key, Value]

    def ops(self) -> list[RawOp]:
        x, _, source = (arg.key for arg in self.scatter.args)
        (result,) = self.scatter.outputs
        width = self.values[x].shape[-1]
        num_rows = math.prod(self.values[source].shape[:-1])
        return list(self._ops(x, source, result, num_rows, width))

    def _ops(self, x: Key, source: Key, result: str, num_rows: int, width: int) -> Iterator[RawOp]:
        tokens = math.prod(self.values[x].shape[:-1])
        flat, counts, positions, spread, chosen, rows, taken, back = (
            f"{result}:{name}"
            for name in ("flat", "counts", "positions", "spread", "chosen", "rows", "taken", "back")
        )
        make = self._make
        yield make("reshape", flat, (tokens,), "bool", self.mask, (tokens,))
        yield make("cumsum", counts, (tokens,), "int64", flat, 0)
        yield make("sub.Tensor", positions, (tokens,), "int64", counts, 1)
        line = make("arange", f"{result}:line", (tokens,), "int64", tokens)
        yield replace(line, kwargs=(("dtype", Symbol("dtype", "int64")), ("device", _DEVICE)))
        # Elsewhere rows in turn, so that no rank is asked for more than another.
        yield make("remainder.Scalar", spread, (tokens,), "int64", f"{result}:line", num_rows)
        yield make("where.self", chosen, (tokens,), "int64", flat, positions, spread)
        yield make("reshape", rows, (num_rows, width), "", source, (num_rows, width))
        yield make("index_select", taken, (tokens, width), "", rows, 0, chosen)
        shape = self.values[x].shape
        yield make("reshape", back, shape, "", taken, shape)
        yield make("where.self", result, shape, "", self.mask, back, x)

    def _make(self, op: str, name: str, shape: tuple[int, ...], dtype: str, *args: object) -> RawOp:
        """An op that makes `name`; dtype "": that of the scatter."""
        like = self.values[self.scatter.outputs[0]]
        self.values[name] = replace(like, shape=shape, dtype=dtype or like.dtype)
        target = f"aten.{op}" if "." in op else f"aten.{op}.default"
        keys: tuple[RawArg, ...] = tuple(
            Operand(arg) if isinstance(arg, str | Source) else arg for arg in args
        )
        return replace(self.scatter, target=target, args=keys, kwargs=(), outputs=(name,))
