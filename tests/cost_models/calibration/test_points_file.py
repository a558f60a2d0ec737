"""The file of points: both ways, and what is refused."""

import json
from pathlib import Path

import pytest
from support.programs.profiles import example_profile

from meshfold.cost_models.calibration.points_file import (
    load_profile,
    points_path,
    profile_from_json,
    profile_to_json,
    save_profile,
)
from meshfold.errors import ClusterSpecError


def test_both_ways(tmp_path: Path) -> None:
    path = points_path(tmp_path / "cluster.json")
    assert path.name == "cluster.points.json"
    save_profile(example_profile(), path)
    assert load_profile(path) == example_profile()
    assert profile_from_json(profile_to_json(example_profile())) == example_profile()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("version", 1, "version"),
        ("kernels", {"a": {"kind": "gemm"}}, "missing field"),
        ("surplus", 1, "surplus: unknown field"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, key: str, value: object, message: str) -> None:
    path = tmp_path / "x.points.json"
    save_profile(example_profile(), path)
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(ClusterSpecError, match=f"x.points.json: .*{message}.*; delete it to"):
        load_profile(path)


def test_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ClusterSpecError, match="not JSON .*; delete it to measure anew"):
        load_profile(tmp_path / "x.json")
