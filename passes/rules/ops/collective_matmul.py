"""Rules of collective matmuls (meshfold.ops.collective_matmul).

    all_gather_matmul   x [..., k], weights [o, k], biases [o] -> [..., o] each
    matmul_reduce_scatter   x [..., k], weight [o, k], bias [o] -> [..., o]

both with `transposed` for weights [k, o]. No captured graph has them:
passes/collective_matmul/rewrite.py writes them where a product reads what an axis gathers, or makes
what it reduces and scatters. On that axis the rule "ring" has rows in shards on one side, and on
the other what the weights have. Other axes shard rows, or nothing, and have no ring. blocks: those
of the rows, then of each weight; of the unsharded tensors, as in types.
"""

import math
from collections.abc import Sequence

from meshfold.ir.op_graph import Op
from meshfold.ir.spmd import local_blocks
from meshfold.ir.strategy import OpTyping
from meshfold.passes.rules.ops.labels import (
    SHIFT,
    BoundOp,
    DimLabel,
    Dims,
    OpLabels,
    RuleComm,
    Special,
    dim_label,
    numbered,
    rule,
)

RING = "ring"
ALL_GATHER_MATMUL = "meshfold.all_gather_matmul.default"
MATMUL_REDUCE_SCATTER = "meshfold.matmul_reduce_scatter.default"
_PARAMETERS = "dim blocks transposed num_ranks"


def ring_name(blocks: Sequence[int]) -> str:
    """The name of the rule with these blocks."""
    finest = math.lcm(*blocks)
    return f"{RING}/{finest}" if finest > 1 else RING


def ring_of(op: Op, typing: OpTyping, sizes: Sequence[int]) -> tuple[int, int] | None:
    """(axis, blocks) of the ring of one of these ops: blocks of the rows that one rank sees, since
    another axis may have split them. None where no axis has a ring."""
    names = [name.partition("/")[0] for name in typing.rules]
    if RING not in names:
        return None
    axis = names.index(RING)
    rows = typing.inputs[0] if op.target == ALL_GATHER_MATMUL else typing.outputs[0]
    return axis, local_blocks(rows, sizes, axis)


def _all_gather_matmul(op: BoundOp) -> OpLabels:
    rows, dim, (of_rows, *of_weights) = _rows(op)
    # A weight without a bias has none in the list.
    given = op.get("biases")
    assert isinstance(given, tuple)
    with_bias = [p for p, bias in zip(of_weights, given, strict=True) if bias is not None]
    inputs: tuple[Dims, ...] = ((*rows, None), *((None, None),) * len(of_weights))
    inputs += ((None,),) * len(with_bias)
    here: tuple[Dims, ...] = (
        (*_only(rows, dim, of_rows), None),
        *(_weight(op, p, of_output=True) for p in of_weights),
        *((p,) for p in with_bias),
        *((*(None,) * len(rows), p) for p in of_weights),
    )
    return OpLabels(
        inputs,
        ((*rows, None),) * len(of_weights),
        special={RING: Special(local="all_gather_matmul", comm=_comm(op, "x"))},
        alternatives={RING: here},
    )


def _matmul_reduce_scatter(op: BoundOp) -> OpLabels:
    rows, dim, (of_rows, of_weight) = _rows(op)
    biases = op.positions("bias")
    inputs: tuple[Dims, ...] = ((*rows, None), (None, None), *((None,),) * len(biases))
    here: tuple[Dims, ...] = (
        (*(None,) * len(rows), of_weight),
        _weight(op, of_weight, of_output=False),
        *((None,),) * len(biases),
        (*_only(rows, dim, of_rows), None),
    )
    comm = _comm(op, "")
    return OpLabels(
        inputs,
        ((*rows, None),),
        summed=frozenset({RING}),
        added=frozenset(biases),
        special={RING: Special(local="matmul_reduce_scatter", comm=comm)},
        alternatives={RING: here},
    )


def _rows(op: BoundOp) -> tuple[Dims, int, tuple[DimLabel, ...]]:
    """Labels of the rows, the dim that is sharded, and the shards of rows and of each weight."""
    blocks = op.integers("blocks")
    finest = math.lcm(*blocks)
    shards = tuple(dim_label(RING, finest // count) for count in blocks)
    return numbered(op.value("x").shape[:-1]), op.integer("dim"), shards


def _only(rows: Dims, dim: int, shard: DimLabel) -> Dims:
    return tuple(shard if d == dim else None for d in range(len(rows)))


def _weight(op: BoundOp, shard: DimLabel, *, of_output: bool) -> Dims:
    """Dims of a weight that is sharded by outputs, or by inputs."""
    return (shard, None) if of_output != bool(op.get("transposed")) else (None, shard)


def _comm(op: BoundOp, name: str) -> tuple[RuleComm, ...]:
    """Rows in flight, of all ranks: those of x, or of the result; in backward their gradients."""
    num_bytes = (op.value(name) if name else op.outputs[0]).num_bytes
    return RuleComm(SHIFT, num_bytes), RuleComm(SHIFT, num_bytes, is_backward=True)


COLLECTIVE_MATMUL_RULES = {
    ALL_GATHER_MATMUL: rule(f"x weights biases {_PARAMETERS}", _all_gather_matmul),
    MATMUL_REDUCE_SCATTER: rule(f"x weight bias {_PARAMETERS}", _matmul_reduce_scatter),
}
