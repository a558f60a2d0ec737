"""Rows go to their experts and come back, on simulated ranks."""

import pytest
import torch
from support.graphs.ops import mesh_of
from support.processes.ranks import CollectiveMismatchError, ThreadMesh, run_on_simulated_ranks
from torch import Tensor

from meshfold.cost_models.memory.op_memory import ProbeKey, dense_spec
from meshfold.distributed.rank_mesh import RankMesh
from meshfold.distributed.replayed_counts import RecordedCounts
from meshfold.distributed.step_context import StepContext
from meshfold.ir.op_graph import Ref
from meshfold.memory_probe.prober import OpProber
from meshfold.ops.expert_dispatch import (
    as_before,
    by_expert,
    combine,
    dispatch,
    routed,
    start_combine,
    start_dispatch,
    wait_combine,
    wait_dispatch,
)

NUM_EXPERTS, ROWS = 8, 5

ROUTINGS = {
    "mixed": [[7, 0, 3, 3, 6], [1, 1, 0, 5, 2], [4, 7, 7, 2, 0], [6, 5, 4, 3, 2]],
    "all to one rank": [[2, 3, 2, 2, 3]] * 4,
    "all at home": [[0, 1, 1, 0, 0], [2, 2, 3, 3, 2], [4, 5, 4, 5, 4], [7, 7, 7, 7, 7]],
}


def rows_of(rank: int) -> Tensor:
    """[ROWS, 3], every number different from any other rank's."""
    return torch.arange(ROWS * 3, dtype=torch.float64).reshape(ROWS, 3) + 100 * rank


@pytest.mark.parametrize("routing", ROUTINGS)
def test_rows_meet_the_rank_of_their_expert_and_come_back(routing: str) -> None:
    ids = [torch.tensor(of_rank) for of_rank in ROUTINGS[routing]]

    def body(mesh: RankMesh) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = rows_of(mesh.rank).requires_grad_()
        own = ids[mesh.rank]
        with torch.enable_grad():
            there = dispatch(StepContext(mesh), x, own, NUM_EXPERTS, "dp")
            back = combine(StepContext(mesh), there * (mesh.rank + 1), own, NUM_EXPERTS, "dp")
            (gradient,) = torch.autograd.grad(back, x, rows_of(0) + 1)
        experts = dispatch(StepContext(mesh), own, own, NUM_EXPERTS, "dp")
        return there.detach(), experts, back.detach(), gradient

    results = run_on_simulated_ranks(mesh_of(4), body)
    for rank, (there, experts, back, gradient) in enumerate(results):
        assert set((experts // 2).tolist()) <= {rank}
        # In order of arrival: by sender, then by expert, then as the sender had them.
        orders = [ids[r].argsort(stable=True) for r in range(4)]
        wanted = [order[ids[r][order] // 2 == rank] for r, order in enumerate(orders)]
        assert torch.equal(there, torch.cat([rows_of(r)[rows] for r, rows in enumerate(wanted)]))
        assert torch.equal(experts, torch.cat([ids[r][rows] for r, rows in enumerate(wanted)]))
        factor = (ids[rank] // 2 + 1).unsqueeze(1)
        assert torch.equal(back, rows_of(rank) * factor)
        assert torch.equal(gradient, (rows_of(0) + 1) * factor)


def test_counts_are_exchanged_first_and_not_in_backward() -> None:
    def body(mesh: RankMesh) -> list[str]:
        assert isinstance(mesh, ThreadMesh)
        x = rows_of(mesh.rank).requires_grad_()
        own = torch.tensor(ROUTINGS["mixed"][mesh.rank])
        with torch.enable_grad():
            dispatch(StepContext(mesh), x, own, NUM_EXPERTS, "dp").sum().backward()
        return [kind for kind, _ in mesh.log]

    assert run_on_simulated_ranks(mesh_of(4), body) == [["all_to_all", "exchange", "exchange"]] * 4


@pytest.mark.parametrize("routing", ROUTINGS)
def test_counts_say_which_expert_every_row_wants(routing: str) -> None:
    def body(mesh: RankMesh) -> tuple[Tensor, Tensor]:
        own = torch.tensor(ROUTINGS[routing][mesh.rank])
        return routed(StepContext(mesh), own, NUM_EXPERTS, "dp").experts, dispatch(
            StepContext(mesh), own, own, NUM_EXPERTS, "dp"
        )

    for known, arrived in run_on_simulated_ranks(mesh_of(4), body):
        assert torch.equal(known, arrived)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_two_exchanges_are_in_flight_at_once_in_both_directions(routing: str) -> None:
    """Of two parts of the rows, each with a route of its own."""

    def body(mesh: RankMesh) -> tuple[Tensor, Tensor, list[str]]:
        assert isinstance(mesh, ThreadMesh)
        own = torch.tensor(ROUTINGS[routing][mesh.rank])
        x = rows_of(mesh.rank).requires_grad_()
        with torch.enable_grad():
            parts = list(zip(x.split(2), own.split(2), strict=True))
            routes = [routed(StepContext(mesh), ids, NUM_EXPERTS, "dp") for _, ids in parts]
            leaving = [by_expert(part, r) for (part, _), r in zip(parts, routes, strict=True)]
            there = [
                start_dispatch(StepContext(mesh), rows, "dp", r)
                for rows, r in zip(leaving, routes, strict=True)
            ]
            come = [
                wait_dispatch(StepContext(mesh), f, "dp", r)
                for f, r in zip(there, routes, strict=True)
            ]
            back = [
                start_combine(StepContext(mesh), rows * 3, "dp", r)
                for rows, r in zip(come, routes, strict=True)
            ]
            home = [
                wait_combine(StepContext(mesh), f, "dp", r)
                for f, r in zip(back, routes, strict=True)
            ]
            y = torch.cat([as_before(rows, r) for rows, r in zip(home, routes, strict=True)])
            (gradient,) = torch.autograd.grad(y, x, rows_of(1))
        return y.detach(), gradient, [kind for kind, _ in mesh.log]

    for rank, (y, gradient, log) in enumerate(run_on_simulated_ranks(mesh_of(4), body)):
        assert torch.equal(y, rows_of(rank) * 3) and torch.equal(gradient, rows_of(1) * 3)
        assert log == ["all_to_all"] * 3 + ["exchange"] * 12


def test_counts_of_a_first_run_are_those_of_the_second() -> None:
    def body(mesh: RankMesh) -> tuple[bool, list[str]]:
        assert isinstance(mesh, ThreadMesh)
        own = torch.tensor(ROUTINGS["mixed"][mesh.rank])
        counts = RecordedCounts()
        first = routed(StepContext(mesh, counts=counts), own, NUM_EXPERTS, "dp")
        second = routed(StepContext(mesh, counts=counts.replayed()), own, NUM_EXPERTS, "dp")
        same = torch.equal(first.experts, second.experts) and first.sent == second.sent
        return same and first.received == second.received, [kind for kind, _ in mesh.log]

    assert run_on_simulated_ranks(mesh_of(4), body) == [(True, ["all_to_all"])] * 4


def test_simulated_ranks_notice_counts_that_disagree() -> None:
    def body(mesh: RankMesh) -> None:
        mesh.wait(mesh.start_exchange(rows_of(0), ("dp",), [2, 3], [1, 4]))

    with pytest.raises(CollectiveMismatchError, match="came"):
        run_on_simulated_ranks(mesh_of(2), body)


def test_unsharded_both_are_views() -> None:
    x, ids = rows_of(0), torch.tensor(ROUTINGS["mixed"][0])
    for op in (torch.ops.meshfold.dispatch.default, torch.ops.meshfold.combine.default):
        same = op(x, ids, NUM_EXPERTS)
        assert torch.equal(same, x) and same.data_ptr() == x.data_ptr()


def test_a_probe_sees_as_many_rows_as_the_busiest_rank_gets() -> None:
    """5 rows, 1.25 times as many: 7. Either way the order, 8 bytes a row, is kept."""
    x, ids = dense_spec((ROWS, 3), "float32", True), dense_spec((ROWS,), "int64", False)
    prober, refs = OpProber(), (Ref(0), Ref(1), NUM_EXPERTS)
    there = prober(ProbeKey("meshfold.dispatch.default", (*refs, 1.25), (), (x, ids)))
    (out,) = there.outputs
    assert (out.spec.shape, out.num_bytes) == ((7, 3), 7 * 3 * 4)
    assert (there.saved_operands, there.saved_bytes) == ((), 7 * 8)
    back = prober(ProbeKey("meshfold.combine.default", (*refs, 1.25), (), (out.spec, ids)))
    assert back.outputs[0].spec.shape == (ROWS, 3)
    assert back.saved_bytes == ROWS * 8
    still = prober(ProbeKey("meshfold.dispatch.default", refs, (), (x, ids)))
    assert (still.outputs[0].storage, still.saved_bytes) == (0, 0)
