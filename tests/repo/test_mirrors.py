"""Every source file has a test file of its name, in the folder of its name."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_TEST = {"compiler": 52, "passes": 42, "cost_models": 6}
"""Files whose tests still have another name, or are in tests/features. May only shrink."""


@pytest.mark.parametrize("top", WITHOUT_TEST)
def test_files_without_a_test_of_their_own_become_fewer(top: str) -> None:
    """tests/passes/run/test_hull.py is that of passes/run/hull.py."""
    sources = [p for p in sorted((ROOT / top).rglob("*.py")) if p.name != "__init__.py"]
    folder = {p: ROOT / "tests" / p.parent.relative_to(ROOT) for p in sources}
    without = [str(p) for p in sources if not (folder[p] / f"test_{p.name}").is_file()]
    assert len(without) <= WITHOUT_TEST[top], f"a new file without a test, among {without}"
    assert len(without) == WITHOUT_TEST[top], f"lower the number to {len(without)}"
