"""Process groups: their timeouts, and on which addresses local ones listen."""

import sys

import pytest
import torch
import torch.distributed as dist
from support.graphs.ops import mesh_of
from support.processes.groups import contrastive
from support.processes.pool import Pools
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshfold.torch_compat.process_groups import as_one_process

pytestmark = pytest.mark.multiprocess


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_local_groups_listen_on_this_machine_only(pools: Pools) -> None:
    for hosts in pools.run(2, "support.processes.groups:listening_hosts", mesh_of(2)):
        assert hosts == {"127.0.0.1"}


def test_groups_have_the_timeout_of_the_default_group_or_of_the_step(pools: Pools) -> None:
    for default_s, found in pools.run(2, "support.processes.groups:timeouts", mesh_of(2)):
        assert found == [default_s, 7.0, default_s]


@pytest.mark.parametrize("pins", [{"dp": 2, "zero": 3}, {"tp": 2}])
def test_a_model_that_gathers_over_ranks_is_that_of_one_process(
    pools: Pools, pins: dict[str, int]
) -> None:
    model, batch = contrastive()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for _ in range(3):
        loss = model(**batch)
        loss.backward()
        expected.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    for losses in pools.run(2, "support.processes.groups:contrastive_losses", pins):
        assert losses == pytest.approx(expected, rel=1e-12)


def _in_a_context(rank_of_none: list[object]) -> None:
    with as_one_process():
        rank_of_none.append(dist.is_initialized())
        raise KeyError


def test_the_group_is_back_whatever_happens() -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        seen: list[object] = []
        with pytest.raises(KeyError):
            _in_a_context(seen)
        assert seen == [False] and dist.is_initialized() and dist.get_world_size() == 2
    finally:
        dist.destroy_process_group()
