"""Cluster files: round trip and every refusal."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.programs.plans import cluster_text

from meshfold.cost_models.hardware.devices import cluster, presets
from meshfold.errors import ClusterSpecError
from meshfold.plan_file.cluster_file import cluster_from_json, load_cluster


@pytest.mark.parametrize("name", presets())
def test_round_trip_gives_the_same_cluster_and_the_same_bytes(name: str) -> None:
    spec = cluster(f"{name}x3")
    text = cluster_text(spec)
    assert cluster_from_json(text) == spec
    assert cluster_text(cluster_from_json(text)) == text


def test_optional_figures_may_be_left_out() -> None:
    data = json.loads(cluster_text(cluster("l4")))
    for field in ("start_s", "ramp_bytes", "reduce_bytes_per_s", "bytes_per_s_by_ranks"):
        del data["network"][field]
    del data["groups"][0]["device"]["host_bytes_per_s"]
    assert cluster_from_json(json.dumps(data)).host_bytes_per_s == 0
    assert cluster_from_json(json.dumps(data)).network.start_s == 0


def _edit(change: Callable[[dict[str, Any]], Any]) -> str:
    data = json.loads(cluster_text(cluster("dgx-h100")))
    change(data)
    return json.dumps(data)


CASES = [
    ("{", "not JSON ("),
    ("[1]", "version: this meshfold reads cluster files of version 1, found None"),
    (_edit(lambda d: d.update(version=2)), "version: this meshfold reads cluster fil"),
    (_edit(lambda d: d.pop("version")), "version: this meshfold reads"),
    (_edit(lambda d: d.update(color=1)), "color: unknown field"),
    (_edit(lambda d: d.pop("network")), "network: missing field"),
    (
        _edit(lambda d: d["groups"][0].update(num_nodes="2")),
        "groups[0].num_nodes: input should be a valid integer",
    ),
    (
        _edit(lambda d: d["groups"][0]["device"].update(memory=1)),
        "groups[0].device.memory: unknown field",
    ),
    (
        _edit(lambda d: d["groups"][0].update(num_nodes=0)),
        "groups[0].num_nodes: must be 1 or more, got 0",
    ),
    (_edit(lambda d: d.update(groups=[])), "groups: a cluster needs at least one"),
]


@pytest.mark.parametrize(("text", "message"), CASES, ids=[m[:40] for _, m in CASES])
def test_a_wrong_file_is_refused_with_the_field(text: str, message: str) -> None:
    with pytest.raises(ClusterSpecError) as caught:
        cluster_from_json(text)
    assert str(caught.value).startswith(message)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ClusterSpecError, match="cannot be read .No such file or directory"):
        load_cluster(tmp_path / "none.json")
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ClusterSpecError, match="cannot be read .not UTF-8 text"):
        load_cluster(binary)
