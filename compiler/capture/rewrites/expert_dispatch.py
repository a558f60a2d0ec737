"""Where rows may travel to their experts: dispatch and combine around every chain of expert_linear.

    x, ids -> expert_linear -> row by row -> expert_linear -> y

becomes, with everything in between read and computed by rows that may be with their experts,

    x, ids -> dispatch -> expert_linear -> row by row -> expert_linear -> combine -> y

so that a row travels once however many products it takes part in. What else reads a value in
between reads what combine computes from it. On the full tensor both ops return what they are given.
"""

from collections.abc import Iterator
from dataclasses import replace

from meshfold.capture.trace.raw_program import Key, Operand, RawArg, RawOp, RawProgram
from meshfold.passes.rules.ops.experts import COMBINE, DISPATCH, EXPERT_LINEAR
from meshfold.passes.rules.ops.pointwise import POINTWISE_RULES

_OF_ONE_DIM = {
    "aten.split.Tensor": 2,
    "aten.split_with_sizes.default": 2,
    "aten.slice.Tensor": 1,
    "aten.unsqueeze.default": 1,
    "aten.squeeze.dim": 1,
}
"""Ops on one dim alone: the place of that argument."""


def with_dispatch(program: RawProgram) -> RawProgram:
    """`program` with the experts' rows free to travel."""
    ops = program.ops
    routes = {op.args[2].key: op.args[1].key for op in ops if op.target == EXPERT_LINEAR}
    for ids, weight in routes.items():
        program = _Route(program, ids, program.values[weight].shape[0]).routed()
    return program


class _Route:
    """Everything that the rows of one routing, `ids`, take part in."""

    def __init__(self, program: RawProgram, ids: Key, num_experts: int) -> None:
        self.program = program
        self.ids = ids
        self.num_experts = num_experts
        self.chain = self._chain()
        self.away = {key for op in self.chain for key in op.outputs}
        self.values = dict(program.values)
        self.there: dict[Key, str] = {}
        self.back: dict[Key, str] = {}

    def routed(self) -> RawProgram:
        links = set(map(id, self.chain))
        ops: list[RawOp] = []
        for op in self.program.ops:
            is_link = id(op) in links
            if is_link:
                rows = [key for key in self._rows(op) if key not in self.away]
                ops.extend(self._travels(rows, DISPATCH, self.there))
            else:
                rows = [key for key in op.operands if key in self.away]
                ops.extend(self._travels(rows, COMBINE, self.back))
            ops.append(_renamed(op, self.there if is_link else self.back))
        results = [key for _, key in (*self.program.outputs, *self.program.mutations)]
        ops.extend(self._travels([k for k in results if k in self.away], COMBINE, self.back))
        return replace(
            self.program,
            ops=ops,
            values=self.values,
            outputs=[(name, self.back.get(k, k)) for name, k in self.program.outputs],
            mutations=[(name, self.back.get(k, k)) for name, k in self.program.mutations],
        )

    def _chain(self) -> list[RawOp]:
        """The products of this routing, and what leads from one to another row by row."""
        after: set[Key] = set()
        able = []
        for op in self.program.ops:
            if self._is_product(op) or self._goes_row_by_row(op, after):
                able.append(op)
                after.update(op.outputs)
        before: set[Key] = set()
        chain = []
        for op in reversed(able):
            if self._is_product(op) or not before.isdisjoint(op.outputs):
                chain.append(op)
                before.update(self._rows(op))
        return chain[::-1]

    def _is_product(self, op: RawOp) -> bool:
        return op.target == EXPERT_LINEAR and op.args[2] == Operand(self.ids)

    def _goes_row_by_row(self, op: RawOp, rows: set[Key]) -> bool:
        """Whether all that `op` reads are `rows`, and each row it computes is computed from one of
        them."""
        if not op.operands or not rows.issuperset(op.operands):
            return False
        shapes = [self.program.values[key].shape for key in (*op.operands, *op.outputs)]
        if len({shape[:1] for shape in shapes}) > 1:
            return False
        if op.target in _OF_ONE_DIM:
            place = _OF_ONE_DIM[op.target]
            dim = op.args[place] if len(op.args) > place else 0
            rank = len(shapes[0]) + (op.target == "aten.unsqueeze.default")
            return bool(dim % rank)
        return op.target in POINTWISE_RULES and len(set(map(len, shapes))) == 1

    def _rows(self, op: RawOp) -> list[Key]:
        """What a link of the chain reads with a row per token."""
        if self._is_product(op):
            return [op.args[0].key, self.ids]
        return list(op.operands)

    def _travels(self, keys: list[Key], target: str, names: dict[Key, str]) -> Iterator[RawOp]:
        """Ops that bring what has not been brought yet; `names` takes what they make."""
        for key in keys:
            if key in names:
                continue
            names[key] = new = f"{key}:{target.split('.')[1]}:{self.ids}"
            self.values[new] = self.values[key]
            maker = next((op for op in self.chain if key in op.outputs), self.chain[0])
            args = (Operand(key), Operand(self.ids), self.num_experts)
            yield RawOp(target, args, (), (new,), maker.stack, maker.source)


def _renamed(op: RawOp, names: dict[Key, str]) -> RawOp:
    if not any(key in names for key in op.operands):
        return op

    def new(arg: RawArg) -> RawArg:
        if isinstance(arg, Operand):
            return Operand(names.get(arg.key, arg.key))
        return tuple(map(new, arg)) if isinstance(arg, tuple) else arg

    kwargs = tuple((name, new(arg)) for name, arg in op.kwargs)
    return replace(op, args=tuple(map(new, op.args)), kwargs=kwargs)
