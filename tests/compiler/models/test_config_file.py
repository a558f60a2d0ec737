"""Configuration files: limits that hold before a model is built."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshfold.errors import OptionError
from meshfold.models.config_file import read_configuration

CONFIGS = sorted((Path(__file__).parents[3] / "examples" / "configs").glob("*.json"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_real_ones_are_within_the_limits(path: Path) -> None:
    assert read_configuration(path).fields == json.loads(path.read_text())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: 1000000000 is more than"),
        ({"n_layer": 4097}, "n_layer: 4097 is more than meshfold builds (4096)"),
        ({"text_config": {"num_experts": 10**5}}, "text_config.num_experts: 100000 is more"),
        ({"depths": [2, 10**6]}, "depths: 1000000 is more"),
        ({"attention_types": [[["global"], 10**9]]}, "attention_types: 1000000000 is more"),
        ({"num_labels": 10**9}, "num_labels: 1000000000 is more than meshfold builds (1000000)"),
        ({"hidden_size": 10**9}, "hidden_size: 1000000000 is more"),
        ({"hidden_size": -(10**9)}, "hidden_size: -1000000000 is more"),
        ({"num_layers": 1000, "num_experts": 1000}, "1000 layers of 1000 experts are more"),
        ({"model_type": 3}, "model_type: missing"),
    ],
)
def test_what_is_too_large_is_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama"} | fields))
    with pytest.raises(OptionError) as caught:
        read_configuration(path)
    assert f"{path}: {message}" in str(caught.value)


def test_what_costs_nothing_may_be_large(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    fields = {"model_type": "switch_transformers", "num_layers": 15, "num_experts": 2048}
    fields |= {"rope_theta": 10**9, "max_position_embeddings": 10**8, "vocab_size": 10**7}
    path.write_text(json.dumps(fields))
    assert read_configuration(path).fields == fields
