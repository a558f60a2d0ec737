"""local-cpu where there are more processes than cores."""

import pytest

from meshfold.cost_models.hardware import shared_cores
from meshfold.cost_models.hardware.devices import cluster
from meshfold.cost_models.hardware.shared_cores import resolve_here, usable_cores, with_turns


def test_four_processes_on_two_cores_take_turns() -> None:
    before, after = cluster("local-cpux4"), with_turns(cluster("local-cpux4"), 2)
    (old,), (new,) = before.groups, after.groups
    assert new.device.peak_flops_per_s["float32"] == old.device.peak_flops_per_s["float32"] / 2
    assert new.device.memory_bytes_per_s == old.device.memory_bytes_per_s / 2
    assert new.device.launch_s == 2 * old.device.launch_s
    assert new.device.source.endswith("; 4 processes on 2 cores")
    assert (new.link, new.device.memory_bytes) == (old.link, old.device.memory_bytes)


@pytest.mark.parametrize(("text", "cores"), [("local-cpux2", 2), ("local-cpu", 1), ("dgx-h100", 1)])
def test_others_stay(text: str, cores: int) -> None:
    spec = cluster(text)
    assert with_turns(spec, cores) is spec


def test_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_cores, "usable_cores", lambda: 2)
    spec, notes = resolve_here("local-cpu", 4)
    assert spec == with_turns(cluster("local-cpux4"), 2)
    assert notes == (
        "4 processes share 2 cores of this machine, so that each computes at 50% of the rate of "
        "local-cpu; 'meshfold profile' measures it",
    )
    assert resolve_here("local-cpux2", None) == (cluster("local-cpux2"), ())


def test_cores_are_those_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.delattr(shared_cores.os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(shared_cores.os, "cpu_count", lambda: None)
    assert usable_cores() == 1
