"""Timer: how often a call runs, and calls that fail."""

import time

import pytest
import torch

from meshfold.profiling.timing import SAMPLES, Timer

CPU = torch.device("cpu")


def test_a_short_call_is_repeated_for_a_sample() -> None:
    runs: list[float] = []

    def run() -> None:
        runs.append(time.perf_counter())
        time.sleep(1e-3)

    seconds = Timer(CPU, 5e-3).seconds(run)
    assert seconds is not None and seconds >= 1e-3
    assert 2 + 1 <= len(runs) <= 2 + SAMPLES * 5


def test_a_long_call_runs_twice() -> None:
    runs: list[int] = []

    def run() -> None:
        runs.append(1)
        time.sleep(0.02)

    seconds = Timer(CPU, 1e-3).seconds(run)
    assert seconds is not None and seconds >= 0.02
    assert len(runs) == 2


def test_what_the_device_lacks_has_no_seconds() -> None:
    def run() -> None:
        raise RuntimeError("not implemented for this dtype")

    assert Timer(CPU, 1e-3).seconds(run) is None


def test_alone_everybody_agrees() -> None:
    assert Timer(CPU, 1e-3).agreed([1.0, 2.5]) == pytest.approx([1.0, 2.5])
