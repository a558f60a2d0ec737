"""A profile in one process: turns, time, and going on."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from support.programs.profiles import example_profile

from meshfold.cost_models.calibration.points import Profile
from meshfold.profiling import session
from meshfold.profiling.machine import this_machine
from meshfold.profiling.session import Task, goes_on, profile, tasks
from meshfold.profiling.timing import Timer

CPU = torch.device("cpu")


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_turns_begin_with_one_point_of_each_kind() -> None:
    first = [task.name.partition("/")[0] for task in tasks([], "cpu")[:5]]
    assert first == ["float32", "copy", "start", "float32", "float32"]
    assert len(tasks([], "cuda")) > len(tasks([], "cpu"))


def three(_: object, __: str) -> list[Task]:
    """Points a and b, and c, which the device lacks."""

    def task(name: str) -> Task:
        def run(_: Timer, before: Profile) -> Profile | None:
            point = example_profile().kernels["copy"]
            return None if name == "c" else replace(before, kernels={**before.kernels, name: point})

        return Task(name, lambda p: name in p.kernels, run)

    return [task(name) for name in "abc"]


def test_all_points(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "tasks", three)
    told: list[tuple[int, int]] = []
    found = profile(CPU, 1, 1.0, None, lambda now, total: told.append((now.num_points, total)))
    assert found.finished and set(found.kernels) == {"a", "b"}
    assert told == [(1, 3), (2, 3), (2, 3)]


def test_time_is_over(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "tasks", three)
    found = profile(CPU, 1, 0.0, None, lambda *_: None)
    assert not found.finished and found.num_points == 0


def test_an_interrupted_profile_of_this_machine_goes_on(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "tasks", three)
    machine = this_machine(CPU, "gloo", 1)
    point = replace(example_profile().kernels["copy"], seconds=7.0)
    known = replace(example_profile(finished=False), machine=machine, kernels={"a": point})
    assert profile(CPU, 1, 1.0, known, lambda *_: None).kernels["a"] == point
    elsewhere = replace(known, machine=replace(machine, cores=99))
    assert profile(CPU, 1, 1.0, elsewhere, lambda *_: None).kernels["a"] != point


def test_what_goes_on() -> None:
    known = example_profile(finished=False)
    assert goes_on(known, known.machine)
    assert not goes_on(known, replace(known.machine, processes=4))
    assert not goes_on(example_profile(), known.machine)
