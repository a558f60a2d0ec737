"""Process groups: their timeouts, and on which addresses local ones listen."""

import sys

import pytest
from support.graphs.ops import mesh_of
from support.processes.pool import Pools

pytestmark = pytest.mark.multiprocess


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_local_groups_listen_on_this_machine_only(pools: Pools) -> None:
    for hosts in pools.run(2, "support.processes.groups:listening_hosts", mesh_of(2)):
        assert hosts == {"127.0.0.1"}


def test_groups_have_the_timeout_of_the_default_group_or_of_the_step(pools: Pools) -> None:
    for default_s, found in pools.run(2, "support.processes.groups:timeouts", mesh_of(2)):
        assert found == [default_s, 7.0, default_s]
