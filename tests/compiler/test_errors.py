"""What moved in torch is told in one line, with the versions that pyproject.toml states."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

from meshfold.errors import TORCH_VERSIONS, MeshfoldError, moved

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_what_moved_is_named_with_the_versions_that_have_it() -> None:
    error = moved("_world.default_pg")
    assert isinstance(error, MeshfoldError)
    expected = (
        f"torch {metadata.version('torch')} moved _world.default_pg; use torch {TORCH_VERSIONS}"
    )
    assert str(error) == expected


def test_the_range_of_torch_is_that_of_pyproject() -> None:
    dependencies = tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]
    (stated,) = (d for d in dependencies if re.match(r"torch\b", d))
    first, last = (tuple(map(int, v.split("."))) for v in TORCH_VERSIONS.split(" to "))
    assert stated == f"torch>={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}"
