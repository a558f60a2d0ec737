"""What is still owed at the end of a backward: shards of gradients that other axes sum up."""

import torch
from support.processes.ranks import run_on_simulated_ranks

from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.distributed.rank_mesh import RankMesh
from meshfold.ir.spmd import INVARIANT, REPLICATE, Shard
from meshfold.zero.hierarchical_all_reduce import AllReduces
from meshfold.zero.last_reductions import Gradients, finish_reductions
from meshfold.zero.microbatch_state import Key, SharedStep
from meshfold.zero.parameter_group import GroupMember, ParameterGroup


class Use:
    """Gathered on dp. Its first member is also summed up on tp, its second is not."""

    sums_replicas = False

    def __init__(self, number: int, gradients: Gradients) -> None:
        self.key: Key = (number, 0)
        stored, used = (Shard(0), INVARIANT), (REPLICATE, REPLICATE)
        members = tuple(
            GroupMember(k, str(k), (4,), stored, used, reduce)
            for k, reduce in enumerate(((1,), ()))
        )
        self.group = ParameterGroup((0,), "float32", True, members)
        self.gradients = gradients

    def start_unfinished_reduction(self) -> None: ...

    def finish_reduction(self) -> Gradients:
        return self.gradients

    def adds_up(self, member: int) -> bool:
        return self.key == (2, 0)


def test_shards_that_another_axis_sums_up_wait_for_the_last_microbatch() -> None:
    mesh = build_mesh(resolve_cluster("local-cpu", 4), 2, 2)

    def run(rank: RankMesh) -> list[list[Gradients]]:
        shared, of = SharedStep(), AllReduces(rank)
        found = []
        for is_last in (False, True):
            shared.is_last = is_last
            own = [torch.full((2,), float(rank.rank)), torch.ones(2)]
            uses = [Use(0, own), Use(1, None), Use(2, [None, torch.ones(2)])]
            found.append(finish_reductions(uses, rank, shared, of))
        return found

    for rank, (first, last) in enumerate(run_on_simulated_ranks(mesh, run)):
        (owed, done), nothing, added = first
        assert owed is None and done.tolist() == [1.0, 1.0] and nothing is None
        assert added == [None, None] and last[2][1].tolist() == [2.0, 2.0]
        # Of two microbatches, over the ranks of tp: 0 and 1, or 2 and 3.
        assert last[0][0].tolist() == [2.0 * sum(divmod(rank, 2)[0] * 2 + k for k in (0, 1))] * 2
