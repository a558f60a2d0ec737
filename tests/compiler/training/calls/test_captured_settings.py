"""Settings that a program holds as constants, set to something else later."""

import copy
import gc
import sys
import weakref
from argparse import Namespace
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import meshfold
from meshfold.errors import OptionError
from meshfold.training.calls.captured_settings import CapturedSettings

GLOBAL, TABLE = 1.0, {"rate": [1.0]}
OPTIONS = Namespace(power=1.0, unread=0)
scale = 0.0
X = {"x": torch.linspace(-1, 1, 8).reshape(2, 4)}


class Net(nn.Module):
    of_class = 1.0
    cache: int
    named: int

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.0)
        self.beta, self.rates = 0.5, [1.0, 2.0]
        self.table, self.kept = np.ones(2), torch.ones(2)
        self.config = SimpleNamespace(scale=2.0, inner=SimpleNamespace(shift=1.0), unread=0)
        self.num_steps, self.seen = 0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen = 1
        scale = GLOBAL * TABLE["rate"][0] * self.of_class**OPTIONS.power * self.beta
        scale = scale * self.rates[0] * float(self.table[0]) * self.config.scale
        return (self.dropout(self.linear(x)) * scale * self.kept[0] + self.config.inner.shift).sum()


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "beta": (lambda m: setattr(m, "beta", 0.25), r"beta is 0.25 and was 0.5 when the model was"),
    "type": (lambda m: setattr(m, "beta", torch.tensor(0.5)), "beta is not what it was"),
    "gone": (lambda m: delattr(m, "beta"), "beta was there when the model was captured"),
    "entry": (lambda m: m.rates.__setitem__(1, 3.0), "rates is not what it was"),
    "array": (lambda m: m.table.fill(2), "table is not what it was"),
    "tensor": (lambda m: m.kept.mul_(2), "kept is not what it was"),
    "child": (lambda m: setattr(m.dropout, "p", 0.5), r"dropout\.p is 0.5 and was 0.0"),
    "config": (lambda m: setattr(m.config, "scale", 3.0), r"config\.scale is 3.0 and was 2.0"),
    "another": (lambda m: setattr(m, "config", SimpleNamespace(scale=1)), "config is not what it"),
    "inner": (lambda m: setattr(m.config.inner, "shift", 0.0), r"config\.inner\.shift is 0.0"),
}


@pytest.mark.parametrize(
    ("owner", "name", "value", "text"),
    [
        (Net, "of_class", 2.0, "Net.of_class is 2.0 and was 1.0"),
        (sys.modules[__name__], "GLOBAL", 2.0, r"test_captured_settings\.GLOBAL is 2.0 and was 1"),
        (OPTIONS, "power", 2.0, r"OPTIONS\.power is 2.0 and was 1"),
        (sys.modules[__name__], "OPTIONS", Namespace(power=2.0), r"OPTIONS is not what it was"),
        (sys.modules[__name__], "TABLE", {"rate": [3.0]}, r"TABLE is not what it was"),
    ],
)
def test_classes_and_globals_too(
    owner: Any, name: str, value: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = CapturedSettings(Net())
    settings.check()
    monkeypatch.setattr(OPTIONS, "unread", 1)
    monkeypatch.setattr(sys.modules[__name__], "scale", 1.0)  # as an attribute is called
    settings.check()
    monkeypatch.setattr(owner, name, value)
    with pytest.raises(OptionError, match=text):
        settings.check()


def test_registers_of_libraries_may_grow() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 8}
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    settings = CapturedSettings(model)
    BertModel(BertConfig(**sizes))
    model.set_attn_implementation("eager")  # computes the same
    settings.check()


@pytest.mark.parametrize("case", CHANGES)
def test_what_forward_reads_and_is_another_now_is_refused(case: str) -> None:
    change, text = CHANGES[case]
    model = Net()
    compiled = meshfold.compile(model, "local-cpu", example_inputs=X)
    expected = model(**X).item()
    assert compiled(**X).item() == pytest.approx(expected)
    assert compiled.train_step(X).item() == pytest.approx(expected)
    change(model)
    for call in (lambda: compiled(**X), lambda: compiled.train_step(X)):
        with pytest.raises(OptionError, match=f"^{text}.*; compile the model again, or make it an"):
            call()
    with torch.no_grad(), pytest.raises(OptionError, match=text):
        copy.deepcopy(compiled)(**X)


def test_what_forward_does_not_read_or_writes_itself_may_change() -> None:
    model = Net()
    settings = CapturedSettings(model)
    model.num_steps, model.seen, model.config.unread = 1, 2, 3
    model.beta = float("0.5")
    model.rates = [1.0, 2.0]
    model.name = "new"  # type: ignore[assignment]
    model.eval().requires_grad_(False)
    settings.check()


class Caching(Net):
    """Keeps caches on classes and in globals."""

    def forward(self, x: Tensor) -> Tensor:
        global WRITTEN
        Net.cache = getattr(Net, "cache", 0) + 1
        setattr(type(self), "named", 1)  # noqa: B010
        WRITTEN = 1
        return super().forward(x) * WRITTEN * self.cache * self.named


WRITTEN = 0


def test_caches_of_forward_itself_may_change_wherever_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for owner, name in ((Net, "cache"), (Caching, "named"), (sys.modules[__name__], "WRITTEN")):
        monkeypatch.setattr(owner, name, 1, raising=False)
    settings = CapturedSettings(Caching())
    Net.cache, Caching.named = 2, 3
    monkeypatch.setattr(sys.modules[__name__], "WRITTEN", 2)
    settings.check()


def test_a_setting_is_not_set_on_what_was_compiled() -> None:
    compiled = meshfold.compile(Net(), "local-cpu", example_inputs=X)
    with pytest.raises(OptionError, match="beta is a constant of the compiled program; compile"):
        compiled.beta = 0.1
    compiled.my_note = "kept"
    assert compiled.my_note == "kept"


def test_the_model_is_not_kept() -> None:
    model = Net()
    reference, settings = weakref.ref(model), CapturedSettings(model)
    del model
    gc.collect()
    assert reference() is None
    settings.check()
