"""Call nodes against full capture: equal programs, whatever the model does with its layers."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.graphs.expand import expand
from support.models import hugging_face
from support.models.stacks import (
    CASES,
    Counting,
    CountingGlobally,
    Layer,
    Stack,
    X,
    frozen_weight,
    hooked,
    no_bias,
    odd,
    other_activation,
    other_epsilon,
    reset_counters,
    wider,
)

from meshfold.capture import pipeline
from meshfold.capture.dedup.graph_ops import CALLS
from meshfold.capture.pipeline import capture
from meshfold.capture.trace.fake_model import fake_copy
from meshfold.ir.op_graph import FoldedGraph


def without_notes(graph: FoldedGraph) -> FoldedGraph:
    return dataclasses.replace(graph, notes=())


@pytest.fixture(autouse=True)
def counters_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that count are refused after their capture; here it is the capture that matters."""
    monkeypatch.setattr(pipeline, "refuse_other_next_call", lambda *_: None)


@pytest.fixture
def exported_targets(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Targets in the last exported program, blocks included."""
    targets: set[str] = set()
    export = torch.export.export

    def spying(*args: Any, **kwargs: Any) -> Any:
        program = export(*args, **kwargs)
        targets.clear()
        for module in program.graph_module.modules():
            if isinstance(module, torch.fx.GraphModule):
                targets.update(str(node.target) for node in module.graph.nodes)
        return program

    monkeypatch.setattr(torch.export, "export", spying)
    return targets


@pytest.mark.parametrize("name", CASES)
def test_call_nodes_give_what_full_capture_gives(name: str, exported_targets: set[str]) -> None:
    make, expects_stubs = CASES[name]
    reset_counters()
    found = capture(make(), X)
    used_stubs = not exported_targets.isdisjoint(CALLS)
    reset_counters()
    expected = capture(make(), X, full_capture=True)
    assert expand(without_notes(found.graph)) == expand(without_notes(expected.graph))
    assert without_notes(found.graph) == without_notes(expected.graph)
    assert found.constants.keys() == expected.constants.keys()
    assert used_stubs == expects_stubs


@pytest.mark.parametrize("family", hugging_face.families("llama"))
def test_families_of_eight_layers(family: str, exported_targets: set[str]) -> None:
    model, inputs = hugging_face.tiny_model(family, layers=8, dtype=torch.float32)
    found = capture(model, inputs)
    assert not exported_targets.isdisjoint(CALLS)
    expected = capture(model, inputs, full_capture=True)
    assert without_notes(found.graph) == without_notes(expected.graph)
    assert not any("traced in full" in note for note in found.graph.notes)


@pytest.mark.parametrize(
    "change", [wider, other_activation, frozen_weight, no_bias, hooked], ids=lambda f: f.__name__
)
def test_an_odd_layer_is_not_folded_into_the_others(change: Callable[[Layer], None]) -> None:
    graph = capture(odd(change), X).graph
    counts = [(count, len(graph.regions[r].graph.ops)) for r, _, count in graph.runs]
    assert [count for count, _ in counts] == [1, 3, 1, 4, 1]


def test_an_odd_epsilon_is_a_binding() -> None:
    graph = capture(odd(other_epsilon), X).graph
    assert [count for _, _, count in graph.runs] == [1, 8, 1]
    assert [i.floats for i in graph.instances[1:5]] == [(1e-5,), (1e-5,), (1e-5,), (1e-3,)]


def test_refusals_are_noted() -> None:
    reset_counters()
    notes = capture(Stack(CountingGlobally), X).graph.notes
    assert any("GLOBAL_CALLS is changed" in note for note in notes)
    notes = capture(Stack(Counting), X).graph.notes
    assert any("Counting.calls is written" in note for note in notes)


def test_a_table_of_modules_in_a_closure_is_refused() -> None:
    class Sneaky(Layer):
        """Reads its place out of a table by what it is."""

        def forward(self, x: torch.Tensor, *extra: Any) -> Any:
            return super().forward(x * places[id(self.up.weight)])

    class Placed(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for k, layer in enumerate(self.layers):
                places[id(layer.up.weight)] = k + 1
            return super().forward(x)

    places: dict[int, int] = {}
    found = capture(Placed(Sneaky), X).graph
    assert without_notes(found) == without_notes(
        capture(Placed(Sneaky), X, full_capture=True).graph
    )
    assert any("has an entry per module" in note for note in found.notes)


def test_the_plain_run_leaves_the_fake_copy_and_the_globals_as_they_were() -> None:
    reset_counters()
    capture(Stack(), X)
    model = Stack(Counting)
    capture(model, X)
    assert all(layer.calls == 0 for layer in model.layers)


def test_a_fake_copy_needs_no_storage() -> None:
    model = Stack()
    fake = fake_copy(model.to("meta"))
    assert all(p.device.type == "cpu" for p in fake.module.parameters())
    assert [p.shape for p in fake.module.parameters()] == [p.shape for p in model.parameters()]
