"""Equal layers and what a first forward installs: hooks, caches, counters, registries."""

import contextvars
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import hugging_face
from torch import Tensor, nn

from meshfold.capture.pipeline import capture
from meshfold.errors import CaptureError
from meshfold.ir.returns import ALL, Returns
from meshfold.ops.reference_interpreter import run_graph
from meshfold.torch_compat.global_hooks import hook_tables
from meshfold.torch_compat.pytree import named_contents
from meshfold.validation.float64_mode import float64_everywhere

Places = dict[str, Callable[[], Any]]
PLACES: Places = {
    "list": list,
    "deep object": lambda: SimpleNamespace(inner=SimpleNamespace(found=[])),
    "thread local": threading.local,
    "context variable": lambda: contextvars.ContextVar("collected", default=None),
    "by module": WeakKeyDictionary,
}
TABLE: dict[str, Any] = {}


class Sink:
    """A place that layers put values into, and that the model empties."""

    def __init__(self, kind: str, where: str) -> None:
        self.kind, self.where = kind, where
        self.place = PLACES[kind]()

    def store(self) -> Any:
        """The list or dict behind the place, made when it is first asked for."""
        if self.kind == "deep object":
            return self.place.inner.found
        if self.kind == "thread local":
            if not hasattr(self.place, "found"):
                self.place.found = []
            return self.place.found
        if self.kind == "context variable":
            if self.place.get() is None:
                self.place.set([])
            return self.place.get()
        return self.place

    def put(self, module: nn.Module, value: Tensor) -> None:
        store = self.store()
        if self.kind == "by module":
            store[module] = value
        else:
            store.append(value)

    def drain(self) -> list[Tensor]:
        store = self.store()
        found = list(store.values()) if self.kind == "by module" else list(store)
        store.clear()
        return found


class Layer(nn.Module):
    """A layer whose forward may keep something, read a count, or fill a cache."""

    def __init__(self, habits: frozenset[str]) -> None:
        super().__init__()
        self.habits = habits
        self.norm, self.up = nn.LayerNorm(4), nn.Linear(4, 4)
        self.act, self.down = nn.Tanh(), nn.Linear(4, 4)
        self.memo: dict[str, Any] = {}

    def forward(self, x: Tensor, memo: dict[str, Any]) -> Tensor:
        y = self.down(self.act(self.up(self.norm(x))))
        if "attribute" in self.habits:
            vars(self).setdefault("kept", []).append(y)
        if "own memo" in self.habits:
            self.memo["last"] = y
        if "argument" in self.habits:
            memo["last"] = y
        if "class" in self.habits:
            type(self).last = y
        if "global" in self.habits:
            TABLE["last"] = y
        if "lazy buffer" in self.habits and not hasattr(self, "scale"):
            self.register_buffer("scale", torch.full((), 2.0, dtype=x.dtype))
            y = y * self.scale
        return x + y


class Model(nn.Module):
    """Four layers, with hooks that are installed before, or by the first forward."""

    def __init__(self, sink: Sink, habits: frozenset[str], hooks: str, at: str) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Layer(habits) for _ in range(4))
        self.habits, self.hooks, self.at = habits, hooks, at
        # Outside of what deepcopy copies, as a closure is.
        self.sink = lambda: sink
        self._installed = False
        if hooks == "before":
            self.install()

    def install(self) -> None:
        sink = self.sink()

        def keep(module: nn.Module, args: Any, output: Tensor) -> None:
            sink.put(module, output)

        for layer in self.layers:
            layer.get_submodule(self.at).register_forward_hook(keep)
        self._installed = True

    def forward(self, x: Tensor) -> Any:
        if self.hooks == "lazily" and not self._installed:
            self.install()
        x, memo, reads = self.stem(x), {}, []
        for layer in self.layers:
            x = layer(x, memo)
            for name, source in (("class", vars(Layer)), ("global", TABLE), ("argument", memo)):
                if name in self.habits:
                    reads.append(source["last"])
        for layer in self.layers:
            reads += vars(layer).get("kept", []) + list(layer.memo.values())
        return {"x": x, "reads": reads, "sunk": self.sink().drain()}


HABITS = ("attribute", "own memo", "argument", "class", "global", "lazy buffer")


def assert_captured_or_refused(make: Callable[[], nn.Module]) -> tuple[str, ...]:
    """The captured program computes what the first forward of the model does, to 1e-12, and the
    capture leaves nothing behind that a forward would read. Gives the notes."""
    torch.manual_seed(0)
    model = make().double()
    x = torch.randn(2, 4, dtype=torch.float64)
    try:
        captured = capture(model, {"x": x})
    except CaptureError as error:
        assert "\n" not in str(error)
        return (str(error),)
    found = run_graph(
        captured.graph,
        dict(model.named_parameters()),
        dict(model.named_buffers()),
        captured.constants,
        {"x": x},
    )
    expected = model(x)
    named = {"x": expected["x"]} | {
        f"{k}.{n}": y for k in ("reads", "sunk") for n, y in enumerate(expected[k])
    }
    assert found.keys() == named.keys()
    for name, value in named.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)
    return captured.graph.notes


@pytest.mark.parametrize(
    ("family", "recorded"),
    [
        ("llama", "hidden_states"),
        ("gpt2", "attentions"),
        pytest.param("bert", "hidden_states", marks=pytest.mark.slow),
        pytest.param("mixtral", "router_logits", marks=pytest.mark.slow),
    ],
)
def test_hugging_face_models_that_never_ran_record_every_layer(family: str, recorded: str) -> None:
    model, batch = hugging_face.tiny_model(family, layers=4)
    model.set_attn_implementation("eager")
    model.config.use_cache = False
    inputs = {k: v for k, v in batch.items() if k != "labels"} | {f"output_{recorded}": True}
    with float64_everywhere():
        # The only scalar would be the loss: of Mixtral the loss of its routers.
        captured = capture(model, inputs, returns=Returns(outputs=ALL, has_loss=False))
        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        batch = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
        found = run_graph(captured.graph, parameters, buffers, captured.constants, batch)
        returned = model(**inputs)
    expected = {n: x for n, x in named_contents(returned) if isinstance(x, Tensor)}
    assert found.keys() == expected.keys()
    assert sum(name.startswith(recorded) for name in found) >= 4
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([*PLACES]),
    st.frozensets(st.sampled_from(HABITS), max_size=2),
    st.sampled_from(["none", "before", "lazily"]),
    st.sampled_from(["up", "act", ""]),
)
@pytest.mark.slow
def test_captured_is_the_model_or_refused(
    kind: str, habits: frozenset[str], hooks: str, at: str
) -> None:
    sink = Sink(kind, at)
    assert_captured_or_refused(lambda: Model(sink, habits, hooks, at))


@pytest.mark.parametrize("kind", PLACES)
def test_a_hook_that_keeps_what_it_sees(kind: str) -> None:
    sink = Sink(kind, "act")
    assert_captured_or_refused(lambda: Model(sink, frozenset(), "before", "act"))


@pytest.mark.parametrize("habit", HABITS)
def test_a_layer_that_keeps_what_it_computes(habit: str) -> None:
    sink = Sink("list", "act")
    notes = assert_captured_or_refused(lambda: Model(sink, frozenset([habit]), "none", "act"))
    # What has grown by the next call is returned by it; what is there is not multiplied with again.
    changed = {"attribute": "kept", "lazy buffer": "scale"}.get(habit)
    words = f"forward changes what layers.0.{changed} holds" if changed else "in full"
    assert any(words in note for note in notes)


def test_a_class_attribute_is_written_where_the_model_reads_it() -> None:
    """Beside layers that are reused, so that those that write it are traced as what they are."""

    class Writing(Layer):
        last: Any = 0.0

    class Beside(Model):
        def __init__(self, sink: Sink) -> None:
            super().__init__(sink, frozenset(), "none", "act")
            self.writing = nn.ModuleList(Writing(frozenset(["class"])) for _ in range(3))

        def forward(self, x: Tensor) -> Any:
            reads = []
            for layer in self.writing:
                x = layer(x, {})
                reads.append(x + Writing.last)
            return super().forward(x) | {"reads": reads}

    sink = Sink("list", "act")
    notes = assert_captured_or_refused(lambda: Beside(sink))
    assert any("Writing.last" in note for note in notes), notes
    assert not isinstance(Writing.last, float)


def test_hooks_installed_by_the_first_forward_are_named() -> None:
    sink = Sink("list", "act")
    notes = assert_captured_or_refused(lambda: Model(sink, frozenset(), "lazily", "act"))
    assert any("registers hooks of act when layers.0 is called" in n for n in notes)


def test_hooks_of_all_modules_are_refused_a_shortcut_and_given_back() -> None:
    found: list[Tensor] = []

    class Watching(Model):
        def forward(self, x: Tensor) -> Any:
            found.clear()
            handle = nn.modules.module.register_module_forward_hook(
                lambda module, args, output: (
                    found.append(output) if isinstance(module, nn.Tanh) else None
                )
            )
            returned = super().forward(x)
            handle.remove()
            return returned | {"sunk": list(found)}

    sink = Sink("list", "act")
    assert_captured_or_refused(lambda: Watching(sink, frozenset(), "none", "act"))
    assert not any(hook_tables().values())
