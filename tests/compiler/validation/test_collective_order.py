"""The order of collectives: noted as they are started, compared within groups."""

from dataclasses import replace

from support.programs.local_programs import Rank, capture, emit_uniform, on_ranks, stack_model

from meshfold.ir.mesh import Mesh, MeshAxis
from meshfold.ir.node_groups import NodeLevels
from meshfold.ir.strategy import UniformStrategy
from meshfold.validation.collective_order import (
    StartedCollective,
    collective_mismatch,
    collectives_of,
)

MESH = Mesh((MeshAxis("dp", 2), MeshAxis("tp", 2)))
GATHER = StartedCollective("all_gather", ("dp",), "float32", (8,))
SUM = StartedCollective("all_reduce", ("tp",), "float32", (4, 8))


def test_a_step_starts_the_same_on_all_ranks() -> None:
    model, batch = stack_model()
    captured = capture(model, batch)
    strategy = UniformStrategy(dp=2, tp=2, zero=3, sequence_parallel=True)
    program = emit_uniform(captured, strategy, 4)

    def calls(rank: Rank) -> tuple[StartedCollective, ...]:
        with collectives_of(rank.mesh) as found:
            rank.loss(batch).backward()
        before = len(found)
        rank.loss(batch)
        assert len(found) == before, "what comes later is not noted"
        return tuple(found)

    logs = on_ranks(model, captured, program, calls)
    assert {call.kind for call in logs[0]} >= {"all_gather", "reduce_scatter"}
    assert {call.axes for call in logs[0]} >= {("dp",), ("tp",)}
    assert collective_mismatch(program.levels, logs) == ""


def test_ranks_of_other_groups_may_differ() -> None:
    other = replace(GATHER, shape=(16,))
    # Ranks 0 and 2, 1 and 3 are dp groups.
    assert collective_mismatch(NodeLevels(MESH, 0), [[GATHER], [other], [GATHER], [other]]) == ""


def test_the_first_difference_is_named() -> None:
    other = replace(GATHER, shape=(16,))
    logs = [[SUM, GATHER, GATHER], [SUM], [SUM, GATHER, other], [SUM]]
    assert collective_mismatch(NodeLevels(MESH, 0), logs) == (
        "as number 1 over dp, rank 0 starts all_gather of float32[8] over dp, "
        "rank 2 all_gather of float32[16] over dp"
    )


def test_a_missing_one_is_named() -> None:
    assert collective_mismatch(NodeLevels(MESH, 0), [[SUM], [SUM, SUM], [SUM], [SUM]]) == (
        "rank 1 starts all_reduce of float32[4, 8] over tp, rank 0 does not"
    )
