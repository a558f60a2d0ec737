"""The MODEL argument: factories and configuration files, and every way to get it wrong."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshfold.capture.pipeline import capture
from meshfold.errors import OptionError
from meshfold.models.from_argument import build_model

CONFIGS = Path(__file__).resolve().parents[3] / "examples" / "configs"
TINY = {
    "llama": {
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 32,
        "max_position_embeddings": 8,
    },
    "vit": {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
        "num_labels": 5,
    },
    "t5": {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 1,
        "num_heads": 2,
        "vocab_size": 32,
        "n_positions": 8,
        "decoder_start_token_id": 0,
    },
    "bert": {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM"],
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 32,
        "max_position_embeddings": 8,
    },
}

FACTORIES = """
import torch
from meshfold.ir.custom_ops import CustomRule

def plain():
    return torch.nn.Linear(2, 2), {"input": torch.ones(4, 2)}

def sized(batch=4, seq=8):
    return torch.nn.Linear(2, 2), {"input": torch.ones(batch, seq, 2)}

def wrong():
    return torch.nn.Linear(2, 2), [torch.ones(4, 2)]

def ruled():
    rule = CustomRule("mine::op", "a -> a", (("a",),), (("a",),), ("a",))
    return *plain(), rule

def wrongly_ruled():
    return *plain(), ["a -> a"]

def failing():
    raise KeyError("weights")

def asking():
    model, inputs = plain()
    model.sees_others = torch.distributed.is_initialized()
    return model, inputs

number = 3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with factories in it."""
    (tmp_path / "mine_for_test.py").write_text(FACTORIES)
    (tmp_path / "broken_for_test.py").write_text("import no_such_package_at_all\n")
    (tmp_path / "syntax_for_test.py").write_text("def (:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine_for_test", raising=False)
    return tmp_path


def write(folder: Path, fields: Any) -> str:
    path = folder / "model.json"
    path.write_text(fields if isinstance(fields, str) else json.dumps(fields))
    return str(path)


def test_a_factory_in_the_working_directory(here: Path) -> None:
    built = build_model("mine_for_test:plain")
    assert isinstance(built.model, torch.nn.Linear)
    assert built.example_inputs["input"].shape == (4, 2)
    sized = build_model("mine_for_test:sized", batch=6, sequence=3)
    assert sized.example_inputs["input"].shape == (6, 3, 2)


def test_a_factory_is_shown_no_process_group(here: Path) -> None:
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        assert build_model("mine_for_test:asking").model.sees_others is False
        assert torch.distributed.is_initialized()
    finally:
        torch.distributed.destroy_process_group()


def test_a_factory_may_return_rules_of_its_ops(here: Path) -> None:
    (rule,) = build_model("mine_for_test:ruled").rules
    assert rule.target == "mine::op" and build_model("mine_for_test:plain").rules == ()
    with pytest.raises(OptionError, match="the factory returned .* behind the example inputs"):
        build_model("mine_for_test:wrongly_ruled")


@pytest.mark.parametrize("family", sorted(TINY))
def test_a_configuration_gives_a_model_with_its_loss_inside(here: Path, family: str) -> None:
    path = write(here, TINY[family])
    built = build_model(path, batch=2, device="cpu")
    assert {p.device.type for p in built.model.parameters()} == {"cpu"}
    assert built.model.training
    assert {value.shape[0] for value in built.example_inputs.values()} == {2}
    assert torch.isfinite(built.model(**built.example_inputs).loss)
    again = build_model(path, batch=2, device="cpu")
    pairs = zip(built.model.parameters(), again.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_sequences_are_as_long_as_the_model_takes(here: Path) -> None:
    path = write(here, TINY["t5"])
    assert build_model(path).example_inputs["input_ids"].shape == (1, 8)
    shorter = build_model(path, sequence=4, default_batch=3)
    assert shorter.example_inputs["labels"].shape == (3, 4)


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("bert-large", 335_174_458),
        ("deepseek-v3", 671_026_404_352),
        ("gpt2", 124_439_808),
        ("gpt3-175b", 174_604_836_864),
        ("llama-3-405b", 405_853_388_800),
        ("llama-3-8b", 8_030_261_248),
        ("llama-tiny", 180_800),
        ("mixtral-8x7b", 46_702_792_704),
        ("t5-large", 737_668_096),
        ("vit-huge", 632_045_800),
    ],
)
def test_shipped_configurations_have_their_public_sizes(name: str, num_parameters: int) -> None:
    built = build_model(str(CONFIGS / f"{name}.json"))
    assert sum(p.numel() for p in built.model.parameters()) == num_parameters
    assert {p.device.type for p in built.model.parameters()} == {"meta"}


def test_every_shipped_configuration_is_listed_above() -> None:
    listed = test_shipped_configurations_have_their_public_sizes.pytestmark[0].args[1]
    assert sorted(path.stem for path in CONFIGS.glob("*.json")) == [name for name, _ in listed]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("gpt2", "write package.module:factory or a path of a .json file"),
        (":plain", "write package.module:factory"),
        ("no_such_module_here:f", "no module 'no_such_module_here' here or installed"),
        ("mine_for_test:other", "module 'mine_for_test' has no function 'other'"),
        ("mine_for_test:number", "has no function 'number'"),
        ("mine_for_test:wrong", r"it returned \(Linear, list\)"),
        ("mine_for_test:failing", "the factory raised KeyError: 'weights'"),
        ("broken_for_test:f", "importing it raised ModuleNotFoundError: No module named 'no_such"),
        ("syntax_for_test:f", "importing it raised SyntaxError"),
        ("missing.json", r"missing.json: cannot be read \(No such file or directory\)"),
    ],
)
def test_a_wrong_argument_is_told(here: Path, argument: str, message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        build_model(argument)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("{", "not JSON"),
        ([1], "no Hugging Face configuration file"),
        ({"hidden_size": 8}, "model_type: missing"),
        ({"model_type": "llamma"}, "model_type: transformers knows no 'llamma'"),
        ({**TINY["bert"], "architectures": ["BertModel"]}, "BertModel has no loss .* BertForM"),
        ({"model_type": "wav2vec2"}, "wav2vec2 has no loss that meshfold can train"),
        ({"model_type": "clip"}, "making inputs of CLIP.*image_size.*, or write a factory"),
        ({**TINY["llama"], "dtype": "int8"}, "dtype: 'int8' cannot be trained"),
        ({**TINY["vit"], "hidden_act": "nope"}, "ViTForImageClassification raised KeyError"),
    ],
)
def test_a_wrong_configuration_is_told(here: Path, fields: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        build_model(write(here, fields))


def test_sizes_that_cannot_be(here: Path) -> None:
    with pytest.raises(OptionError, match="--batch 0: no size; write 1 or more"):
        build_model("mine_for_test:sized", batch=0)
    with pytest.raises(OptionError, match="--batch is given but the factory takes no argument"):
        build_model("mine_for_test:plain", batch=2)
    with pytest.raises(OptionError, match="an image model has no sequence"):
        build_model(write(here, TINY["vit"]), sequence=8)


def test_transformers_may_be_missing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(here, TINY["llama"])
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(OptionError, match=r"pip install 'meshfold\[hf\]'"):
        build_model(path)


def test_a_model_that_makes_no_mask_where_it_is_traced_gets_one(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    fields = {**TINY["t5"], "model_type": "longt5", "local_radius": 3}
    del fields["architectures"]
    path.write_text(json.dumps(fields))
    built = build_model(str(path), batch=2, sequence=8)
    assert set(built.example_inputs) == {"input_ids", "labels", "attention_mask"}
    assert capture(built.model, built.example_inputs).graph.num_ops
