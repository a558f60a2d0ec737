"""benchmarks/families.py: families that nobody tuned for, under four plans against one process."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "families.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@pytest.mark.multiprocess
def test_families_agree_and_the_table_is_written(tmp_path: Path) -> None:
    names = ("deepseek_v3", "gemma2", "whisper", "swin", "switch_transformers")
    done = run(*names, "--write", str(tmp_path / "families.md"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ok ") == len(names)
    text = (tmp_path / "families.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith(tuple(f"| {n} " for n in names))]
    assert len(rows) == len(names)
    assert all(row.endswith("| - |") for row in rows), "an op has no rule"


def test_an_unknown_family_is_a_usage_error() -> None:
    done = run("llamma")
    assert done.returncode == 2
    assert "no family 'llamma'; there are llama, mistral" in done.stderr
