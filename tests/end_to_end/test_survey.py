"""benchmarks/survey.py: models of many libraries, under several plans against one process."""

import json
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "survey.py"
NUM_SAMPLED = 4


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_sample_of_today_is_right_or_clearly_refused(tmp_path: Path) -> None:
    """Other models every day, of the libraries that are there in continuous integration."""
    results = tmp_path / "found.json"
    seed = str(date.today().toordinal())
    libraries = ("--library", "torch", "--library", "transformers")
    done = run(*libraries, "--sample", str(NUM_SAMPLED), "--seed", seed, "--results", str(results))
    assert done.returncode == 0, f"seed {seed}\n{done.stdout}{done.stderr}"
    assert len(json.loads(results.read_text())) == NUM_SAMPLED


@pytest.mark.slow
@pytest.mark.multiprocess
def test_what_is_known_is_not_run_again_and_the_table_is_written(tmp_path: Path) -> None:
    results, table = tmp_path / "found.json", tmp_path / "survey.md"
    first = run("--only", "torch/resnet_plain", "--results", str(results))
    assert first.returncode == 0, first.stdout + first.stderr
    found = json.loads(results.read_text())
    plans = found["torch/resnet_plain"]["plans"]
    assert {plans[name]["kind"] for name in ("zero3", "tp+sp", "scheduled")} == {"ok"}
    assert "takes statistics over the batch" in plans["pp2"]["otherwise"]
    plans["zero3"]["worst"] = 0.5
    results.write_text(json.dumps(found))
    again = run("--only", "torch/resnet_plain", "--results", str(results), "--write", str(table))
    assert again.returncode == 0
    assert "| torch | resnet_plain |" in table.read_text() and "| 5e-01 | " in table.read_text()
    assert "| all | 1 | 1 | 1 | 1 | 1 | 1 | 1 |" in table.read_text()


def test_an_unknown_model_is_a_usage_error() -> None:
    done = run("--only", "mlpp")
    assert done.returncode == 2
    assert "no model 'mlpp'; there are " in done.stderr
