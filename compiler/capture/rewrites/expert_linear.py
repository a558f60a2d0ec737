"""Experts in a captured program: weights gathered per token become one op, expert_linear.

A graph of fixed shapes runs experts as products of gathered weights (Hugging Face's batched_mm):

    weights = index(w[e, o, k], ids[t])     bmm(weights, unsqueeze(x, -1))     squeeze -> [t, o]
    weights = index(w[e, k, o], ids[t])     bmm(unsqueeze(x, 1), weights)      squeeze -> [t, o]

with index(bias[e, o], ids[t]) added, or not. Weights of [t, o, k] fit no memory and no expert could
be on another rank than its tokens. The rewriting looks at nothing but these ops, so it finds such
experts in any model. What it replaces is dropped later, where nobody else reads it.
"""

from dataclasses import dataclass, replace

from meshfold.capture.trace.raw_program import Key, Operand, RawArg, RawOp, RawProgram
from meshfold.passes.rules.ops.experts import EXPERT_LINEAR

_ADD = "aten.add.Tensor"


@dataclass(frozen=True, slots=True)
class _Gathered:
    """Rows of a tensor with a row per expert, [e, ...], one for each of ids [t]."""

    table: Key
    ids: Key


def join_experts(program: RawProgram) -> RawProgram:
    """`program` with expert_linear for every product of gathered weights."""
    return _Joiner(program).joined()


class _Joiner:
    def __init__(self, program: RawProgram) -> None:
        self.program = program
        self.makers: dict[Key, RawOp] = {k: op for op in program.ops for k in op.outputs}

    def joined(self) -> RawProgram:
        ops: list[RawOp] = []
        for op in self.program.ops:
            new = self._product(op) or self._with_bias(op) or op
            # A bias looks for the op that its product has become.
            self.makers.update(dict.fromkeys(new.outputs, new))
            ops.append(new)
        return replace(self.program, ops=ops)

    def _product(self, squeeze: RawOp) -> RawOp | None:
        """expert_linear for the squeeze that ends the pattern."""
        product = self._maker(squeeze.args[0]) if _is(squeeze, "aten.squeeze.dim") else None
        if product is None or not _is(product, "aten.bmm.default"):
            return None
        left, right = product.args
        for weights, rows, dim, transposed in ((left, right, 2, False), (right, left, 1, True)):
            gathered, x = self._gathered(weights, 3), self._unsqueezed(rows, dim)
            if gathered and x and _dim(squeeze, 3) == dim:
                args = (Operand(x), Operand(gathered.table), Operand(gathered.ids))
                return replace(
                    product,
                    target=EXPERT_LINEAR,
                    args=(*args, None, transposed),
                    outputs=squeeze.outputs,
                )
        return None

    def _with_bias(self, add: RawOp) -> RawOp | None:
        """expert_linear for the sum of one without a bias and the biases of its rows."""
        if not _is(add, _ADD) or add.kwargs or len(add.args) != 2:
            return None
        for product, rows in (add.args, add.args[::-1]):
            linear, bias = self._maker(product), self._gathered(rows, 2)
            if linear is None or bias is None or linear.target != EXPERT_LINEAR:
                continue
            x, weight, ids, old, transposed = linear.args
            same_dtype = len({self.program.values[k].dtype for k in (*add.operands, bias.table)})
            if old is None and ids == Operand(bias.ids) and same_dtype == 1:
                args = (x, weight, ids, Operand(bias.table), transposed)
                return replace(linear, args=args, outputs=add.outputs)
        return None

    def _maker(self, arg: RawArg) -> RawOp | None:
        return self.makers.get(arg.key) if isinstance(arg, Operand) else None

    def _gathered(self, arg: RawArg, rank: int) -> _Gathered | None:
        """What `arg` gathers from a tensor of `rank` dims, by its first."""
        op = self._maker(arg)
        if op is None or not _is(op, "aten.index.Tensor"):
            return None
        table, indices = op.args
        ids = self.program.values[indices[0].key] if len(indices) == 1 else None
        if ids is None or ids.dtype != "int64" or len(ids.shape) != 1:
            return None
        if len(self.program.values[table.key].shape) != rank:
            return None
        return _Gathered(table.key, indices[0].key)

    def _unsqueezed(self, arg: RawArg, dim: int) -> Key | None:
        """[t, k] of `arg`, which has a dim of size 1 at `dim`."""
        op = self._maker(arg)
        if op is None or not _is(op, "aten.unsqueeze.default") or _dim(op, 3) != dim:
            return None
        source: Operand = op.args[0]
        return source.key


def _is(op: RawOp, target: str) -> bool:
    return op.target == target


def _dim(op: RawOp, rank: int) -> int:
    """Argument `dim` of a squeeze from, or an unsqueeze to, `rank` dims."""
    dim: int = op.args[1]
    return dim % rank
