"""benchmarks/gpu.py on the CPU: one item of each kind, going on, and files of something else."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu
import pytest
import torch
from click.testing import CliRunner
from measuring.cases import SIZES, alone_item, preset_of, rank_item
from support.programs.profiles import example_profile

from meshfold.cost_models.calibration.fitted_cluster import fitted
from meshfold.profiling.timing import Timer

CPU = torch.device("cpu")
TIMER = Timer(CPU, 0.0)


def test_one_rank_of_four_beside_its_predictions() -> None:
    pins = {"dp": 2, "tp": 2, "zero": 3}
    device = fitted(example_profile(), "mine", "a test").cluster.groups[0].device
    found = rank_item(SIZES["cpu"], "float32", 4, pins, TIMER, device)
    assert found["plan"] == "dp2 x tp2, zero3"
    assert found["predicted_peak_bytes"] / found["measured_peak_bytes"] == pytest.approx(1, abs=0.1)
    seconds = ("measured_compute_s", "predicted_compute_s", "predicted_with_profile_s")
    assert all(found[key] > 0 for key in seconds)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_program_of_one_rank_is_the_model(dtype: str) -> None:
    found = alone_item(SIZES["cpu"], dtype, TIMER)
    assert found["loss_error"] < 1e-6
    assert found["worst_gradient_error"] < (1e-5 if dtype == "float32" else 2e-2)
    assert found["program_step_s"] > 0 and found["model_peak_bytes"] > 0


@pytest.fixture
def two_items(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ran, of an item that works and one that fails once."""
    ran: list[str] = []

    def works() -> dict[str, Any]:
        ran.append("works")
        costs = ("model_step_s", "model_peak_bytes", "program_step_s", "program_peak_bytes")
        return dict.fromkeys(costs, 1.0) | {"loss_error": 0.0, "worst_gradient_error": 0.0}

    def fails() -> dict[str, Any]:
        ran.append("fails")
        if ran.count("fails") == 1:
            raise torch.OutOfMemoryError("out\nof memory")
        return {
            "measured_compute_s": 1e-3,
            "predicted_compute_s": 2e-3,
            "measured_peak_bytes": 4e6,
            "predicted_peak_bytes": 3e6,
        }

    def items(*_: object) -> Iterator[tuple[str, Any]]:
        yield "alone/float32", works
        yield "ranks/float32/2/dp=2", fails

    monkeypatch.setattr(gpu, "items", items)
    return ran


def call(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(gpu.main, ["--device", "cpu", *arguments])
    return done.exit_code, done.output


def test_what_failed_runs_again_and_the_rest_does_not(two_items: list[str], tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    code, output = call("-o", str(path))
    assert code == 0 and "OutOfMemoryError: out of memory" in output
    assert json.loads(path.read_text())["device"] == "cpu"
    code, output = call("-o", str(path))
    assert code == 0 and two_items == ["works", "fails", "fails"]
    assert "compute +100.0%, memory -25.0%" in output
    assert "median error, memory: 25.0% of 1" in output


def test_time_is_over(two_items: list[str], tmp_path: Path) -> None:
    code, output = call("-o", str(tmp_path / "gpu.json"), "--minutes", "1e-9")
    assert code == 0 and "time is over; the same command goes on" in output
    assert two_items == []


def test_interrupted_it_keeps_what_it_has(
    two_items: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(run: Any) -> dict[str, Any]:
        if two_items:
            raise KeyboardInterrupt
        return dict(run())

    monkeypatch.setattr(gpu, "measured", measured)
    code, output = call("-o", str(tmp_path / "gpu.json"))
    assert code == 1 and "interrupted; 1 items are in" in output
    assert set(json.loads((tmp_path / "gpu.json").read_text())["items"]) == {"alone/float32"}


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 1, "device": "another"}'])
def test_another_file_is_refused(two_items: list[str], tmp_path: Path, text: str) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(text)
    code, output = call("-o", str(path))
    assert code == 1 and "is no file of this benchmark, device and torch" in output
    assert path.read_text() == text


def test_the_items_of_a_device() -> None:
    class Nothing:
        items: dict[str, Any] = {}

    names = [name for name, _ in gpu.items(Nothing(), CPU, 1.0)]  # type: ignore[arg-type]
    assert names[:3] == ["profile", "alone/float32", "alone/bfloat16"]
    assert len(names) == len(set(names)) == 13
    assert math.prod(int(name.split("/")[2]) > 0 for name in names[3:])
    assert preset_of(CPU) == "local-cpu"
