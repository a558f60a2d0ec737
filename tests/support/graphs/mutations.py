"""Mutation score of the gate: how many wrong rules does it catch?

A mutant is a rule of one sample op with one type changed: of one operand or one output, to each
other type that its tensor can have on an axis of two ranks. The gate is check_typings, the one that
tests/passes/rules/test_table.py holds every rule against.

Some mutants are right, and no check can catch them. They are told by what they mean (_meaning): a
survivor that means what a rule of the table means, or one of _more_rules, is right; every other one
is a hole in the gate.

    no gradient     I and R of a value are one type where no gradient passes
    unread          of an operand that an op does not read, its local shape counts at most
    one number      shards of a tensor of one number are alike, whatever their blocks; a sum of
                    zeros is zeros, and of nothing is nothing
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from meshfold.ir.op_graph import Value
from meshfold.ir.spmd import (
    INVARIANT,
    PARTIAL,
    REPLICATE,
    Shard,
    SpmdType,
    local_shape,
)
from meshfold.ir.strategy import OpTyping
from meshfold.passes.rules.ops.collective_matmul import (
    ALL_GATHER_MATMUL,
    COLLECTIVE_MATMUL_RULES,
    RING,
)
from meshfold.passes.rules.ops.experts import DISPATCH_OPS, EXPERT_LINEAR
from meshfold.passes.rules.ops.index import ROWS
from support.graphs.ops import BLOCKS, SingleOp, check_typings, mesh_of
from support.graphs.samples import Sample

SIZE = 2
Types = tuple[SpmdType, ...]
"""Labels of the operands, then of the outputs."""

UNREAD = {
    **dict.fromkeys((f"aten.{n}_like.default" for n in ("zeros", "ones", "full")), 0),
    **dict.fromkeys(("aten.fill.Scalar", "aten.fill.Tensor", "aten.copy.default"), 0),
    # Expert numbers are read where rows travel, that is under types that no mutation leads to.
    **dict.fromkeys(DISPATCH_OPS, 1),
}
"""Operand of which an op reads the shape only."""

FLAT = {
    *(f"aten.{name}.default" for name in ("ceil", "floor", "round", "sgn", "sign", "trunc")),
    "aten.round.decimals",
    "aten.fill.Scalar",
}
"""Ops whose gradient is zero wherever there is one."""

FLAT_OUTPUTS = {"aten._linalg_slogdet.default": 0}
"""Result of an op through which no gradient goes: a sign."""

ONE_NUMBER_OUTPUTS = {"aten._linalg_solve_ex.default": 3}
"""Result of an op that is one number everywhere: what went wrong."""

MADE = frozenset(f"aten.{name}.default" for name in ("zeros", "ones", "full"))
"""Ops that make one number from none."""

ONE_NUMBER = (frozenset(UNREAD) - DISPATCH_OPS - {"aten.copy.default"}) | MADE
"""Ops whose result is one number, everywhere."""

ZEROS = frozenset({"aten.zeros_like.default", "aten.zeros.default"})


@dataclass(frozen=True)
class Mutant:
    """A rule with one type exchanged. place: of the type, among operands and then outputs."""

    rule: OpTyping
    place: int
    becomes: SpmdType

    @property
    def typing(self) -> OpTyping:
        types = list(types_of(self.rule))
        types[self.place] = self.becomes
        layouts = tuple((t,) for t in types)
        num_inputs = len(self.rule.inputs)
        return replace(self.rule, inputs=layouts[:num_inputs], outputs=layouts[num_inputs:])

    def __str__(self) -> str:
        num_inputs = len(self.rule.inputs)
        types = [str(t) for t in types_of(self.rule)]
        is_output = self.place >= num_inputs
        what = f"output {self.place - num_inputs}" if is_output else f"operand {self.place}"
        return (
            f"rule {self.rule.rules[0]} ({' '.join(types[:num_inputs])} -> "
            f"{' '.join(types[num_inputs:])}), {what} as {self.becomes}"
        )


@dataclass
class Score:
    """Mutants of samples. right: survivors that are right; survivors: the others, in words."""

    caught: int = 0
    right: int = 0
    survivors: list[str] = field(default_factory=list)


def score(samples: Sequence[Sample], every: int = 1) -> Score:
    """Checks each `every`th mutant of samples."""
    found = Score()
    number = 0
    for _, make in samples:
        op = make()
        for mutant in mutants(op):
            number += 1
            if number % every:
                continue
            if is_caught(op, mutant):
                found.caught += 1
            elif is_right(op, mutant):
                found.right += 1
            else:
                found.survivors.append(f"{op.target} {mutant}")
    return found


def mutants(op: SingleOp) -> Iterator[Mutant]:
    """The mutants of every rule of an op."""
    for typing in op.typings(SIZE):
        types = types_of(typing)
        for place, value in enumerate(op.graph.values):
            for other in _types(value):
                if other != types[place]:
                    yield Mutant(typing, place, other)


def is_right(op: SingleOp, mutant: Mutant) -> bool:
    """Whether it means the same as a rule."""
    rule = mutant.rule.rules[0]
    right = {_meaning(op, types_of(typing)) for typing in op.typings(SIZE)}
    types = types_of(mutant.typing)
    return _meaning(op, types) in right or types in _more_rules(op, rule)


def is_caught(op: SingleOp, mutant: Mutant) -> bool:
    """Whether the gate refuses it. A rule that cannot be emitted or run is refused, too."""
    try:
        check_typings(op, mesh_of(SIZE), [mutant.typing])
    except Exception:  # of whatever kind: a test of the gate fails by any
        return True
    return False


def types_of(typing: OpTyping) -> Types:
    """The types of a typing on one axis."""
    return tuple(layout[0] for layout in (*typing.inputs, *typing.outputs))


def _types(value: Value) -> Iterator[SpmdType]:
    """All that a tensor can be on the axis; pending sums are of numbers with a point."""
    yield INVARIANT
    if value.requires_grad:
        yield REPLICATE
    if value.is_float:
        yield PARTIAL
    for d, extent in enumerate(value.shape):
        yield from (Shard(d, g) for g in BLOCKS if extent and extent % (g * SIZE) == 0)


def _meaning(op: SingleOp, types: Types) -> tuple[object, ...]:
    """Equal for types that say the same about an op."""
    values, num_inputs = op.graph.values, len(op.tensors)
    passes = any(v.requires_grad for v in values[num_inputs:]) and op.target not in FLAT
    passes = passes and not _rounds(op)
    found: list[object] = []
    for k, (value, t) in enumerate(zip(values, types, strict=True)):
        is_flat = FLAT_OUTPUTS.get(op.target) == k - num_inputs
        if t == REPLICATE and (is_flat or not (value.requires_grad and passes)):
            t = INVARIANT
        if k < num_inputs and UNREAD.get(op.target) == k:
            # dispatch and combine do not read the shape either.
            shape = local_shape(value.shape, (t,), (SIZE,))
            found.append(None if op.target in DISPATCH_OPS else shape)
        elif k >= num_inputs and t.is_shard and _is_one_number(op, k - num_inputs):
            found.append(replace(t, blocks=1))
        elif k >= num_inputs and t == PARTIAL and (op.target in ZEROS or 0 in value.shape):
            found.append(INVARIANT)
        else:
            found.append(t)
    return tuple(found)


def _is_one_number(op: SingleOp, result: int) -> bool:
    return op.target in ONE_NUMBER or ONE_NUMBER_OUTPUTS.get(op.target) == result


def _rounds(op: SingleOp) -> bool:
    """Division that rounds has no gradient."""
    return dict(op.graph.ops[0].kwargs).get("rounding_mode") is not None


def _more_rules(op: SingleOp, rule: str) -> frozenset[Types]:
    """Rules that are right and not in the table, since nothing makes such values.

    A table of weights that is a pending sum: looking up is linear in it, and so is the product of
    rows with experts. A mean of a whole value in the place of a shard's: the local implementation
    divides by the number of ranks, and the ranks' results add up to it. Rows that travel to another
    place of a buffer than their own. Rows in a ring that are sharded in another way: they are put
    together, or taken apart, as their type says.
    """
    more: set[Types] = set()
    if op.target in COLLECTIVE_MATMUL_RULES and rule.partition("/")[0] == RING:
        (own,) = (types_of(t) for t in op.typings(SIZE) if t.rules[0] == rule)
        place = 0 if op.target == ALL_GATHER_MATMUL else len(own) - 1
        rows = len(op.graph.values[place].shape) - 1
        shards = (Shard(d, g) for d in range(rows) for g in BLOCKS)
        more |= {(*own[:place], shard, *own[place + 1 :]) for shard in shards}
    if op.target == "aten.embedding.default":
        more.add((PARTIAL, INVARIANT, PARTIAL))
    if op.target == EXPERT_LINEAR and len(op.tensors) == 3:
        more.add((REPLICATE, PARTIAL, INVARIANT, PARTIAL))
    if rule.partition("/")[0] == ROWS and "put" not in op.target and "add" not in op.target:
        own = {types_of(t) for t in op.typings(SIZE) if t.rules[0] == rule}
        more |= {(Shard(0, g), *types[1:]) for types in own for g in BLOCKS}
    if op.target.startswith("aten.mean.") and rule.startswith("d"):
        more.add((REPLICATE, PARTIAL))
    return frozenset(more)
