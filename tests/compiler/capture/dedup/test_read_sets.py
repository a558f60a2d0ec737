"""Files that a forward imports are as complete after the capture as after any import."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from meshfold.capture.pipeline import capture

FILES = {
    "__init__": "TABLE = {}\n\ndef touch():\n    TABLE.setdefault('calls', 0)\n",
    "part": """
import lazy_package

def _first():
    return 1.0

ONE = _first()
lazy_package.touch()

def scaled(x):
    return x * ONE + LATER

LATER = 0.5
""",
}


class Lazy(nn.Module):
    """Imports a part of a package in its first call, which runs functions while it is imported."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))

    def forward(self, x: Tensor) -> Tensor:
        import lazy_package

        lazy_package.touch()
        part = importlib.import_module("lazy_package.part")
        scaled: Tensor = part.scaled(self.layer(x))
        return scaled


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Lazy() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_a_file_that_forward_imports_is_whole_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in FILES.items():
        path = tmp_path / "lazy_package" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        captured = capture(Model(), {"x": torch.randn(2, 4)})
        import lazy_package

        part = sys.modules["lazy_package.part"]
        assert part.LATER == 0.5 and callable(part.scaled)
        assert lazy_package.part is part
        assert captured.graph.num_ops == 26
    finally:
        for name in ("lazy_package", "lazy_package.part"):
            sys.modules.pop(name, None)
