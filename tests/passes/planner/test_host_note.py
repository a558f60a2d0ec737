"""What plans say of layers whose parameters are on the host."""

from dataclasses import replace

import pytest
from support.processes.offload import cluster_with_hosts

from meshfold.errors import InfeasibleError
from meshfold.passes.memory.host_use import HostUse
from meshfold.passes.planner.host_note import LATE, check_host_memory, stored_notes


def test_layers_are_counted() -> None:
    assert stored_notes(["none", "activations"], HostUse()) == []
    stored, late = stored_notes(["optimizer", "none"], HostUse(2_000_000))
    assert stored == (
        "parameters and optimizer states of 1 of 2 layers are in the host's memory: 2.00 MB of it "
        "per device"
    )
    assert late == LATE
    stored, _, by_layer = stored_notes(["optimizer", "parameters", "none"], HostUse(8))
    assert "of 2 of 3 layers" in stored and "of 1 of 3 layers are on the device only" in by_layer
    stored, _, on_disk = stored_notes(["disk", "none"], HostUse(8, 3_000_000))
    assert stored.startswith("parameters and gradients of 1 of 2 layers are in the host's memory")
    assert on_disk == (
        "optimizer states of 1 of 2 layers are on the host's disk: 3.00 MB per device; call "
        "meshfold.keep_states_on_disk(optimizer, folder)"
    )


def test_what_is_more_than_the_host_has_is_refused() -> None:
    spec = cluster_with_hosts(1)
    check_host_memory(HostUse(1 << 60), spec)  # nothing is known
    (group,) = spec.groups
    device = replace(group.device, host_memory_bytes=1000)
    small = replace(spec, groups=(replace(group, device=device),))
    check_host_memory(HostUse(1000, 1 << 60), small)
    with pytest.raises(
        InfeasibleError, match="host's memory per device, and there are 1.00 kB"
    ) as e:
        check_host_memory(HostUse(1001), small)
    assert (e.value.binding_constraint, e.value.required_bytes) == ("host memory", 1001)
