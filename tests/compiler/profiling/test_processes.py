"""Which processes a profile measures."""

from typing import Any

import pytest
from support.processes.pool import Pools
from support.programs.profiles import example_profile

from meshfold.errors import OptionError
from meshfold.profiling import processes
from meshfold.profiling.processes import default_processes, in_job, is_first, profile_local


def test_processes_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "device_type", lambda: "cpu")
    for cores, count in ((1, 2), (2, 2), (3, 3), (64, 4)):
        monkeypatch.setattr(processes, "usable_cores", lambda cores=cores: cores)
        assert default_processes() == count


def test_a_job_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    assert not in_job() and is_first()
    monkeypatch.setenv("RANK", "1")
    assert is_first()  # a variable of something else
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert in_job() and not is_first()
    monkeypatch.setenv("RANK", "0")
    assert is_first()


def test_rank_0_tells_and_its_profile_is_given() -> None:
    told: list[tuple[object, int]] = []

    def run(count: int, *_: Any, on_report: Any, quiet: bool) -> list[Any]:
        on_report(0, (example_profile(), 9))
        return [example_profile()] * count

    found = profile_local(2, 1.0, None, lambda *now: told.append(now), run)
    assert found == example_profile()
    assert told == [(example_profile(), 9)]


@pytest.mark.multiprocess
def test_processes_join_another_default_group(pools: Pools) -> None:
    assert pools.run(2, "support.processes.profile:agreed_again") == [(1.0, "gloo")] * 2


def test_no_processes_are_refused() -> None:
    with pytest.raises(OptionError, match="--processes 0: must be 1 or more"):
        profile_local(0, 1.0, None, lambda *_: None)


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "device_type", lambda: "cuda")
    monkeypatch.setattr(processes.torch.cuda, "device_count", lambda: 1)
    with pytest.raises(OptionError, match="--processes 2: this machine has 1 GPUs"):
        profile_local(2, 1.0, None, lambda *_: None)
