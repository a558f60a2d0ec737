"""Vision-language models of transformers: what they check of image tokens is left out, and every
plan computes what one process does."""

from functools import cache
from typing import Any

import pytest
from support.models.vision_language import BATCH, vision_language_model
from support.programs.local_programs import emit_uniform, errors_of_a_step, one_process

from meshfold.capture.pipeline import Captured, capture
from meshfold.ir.strategy import UniformStrategy
from meshfold.validation.float64_mode import float64_everywhere

STRATEGIES = (
    UniformStrategy(dp=2, zero=3),
    UniformStrategy(tp=2, sequence_parallel=True),
    UniformStrategy(dp=2, tp=2),
)


@cache
def captured(name: str) -> tuple[Any, dict[str, Any], Captured]:
    model, batch = vision_language_model(name)
    with float64_everywhere():
        return model, batch, capture(model, batch)


@pytest.mark.parametrize(
    "name",
    [
        "llava",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("paligemma", "gemma3", "internvl")),
    ],
)
def test_every_plan_computes_what_one_process_does(name: str) -> None:
    model, batch, found = captured(name)
    checks = [note for note in found.graph.notes if note.startswith("a check of values is left")]
    assert len(checks) == 1, "the image tokens are counted"
    right = one_process(model, batch)
    size = max(float(g.abs().max()) for g in right[1].values() if g is not None)
    for strategy in STRATEGIES:
        program = emit_uniform(found, strategy, BATCH)
        for errors in errors_of_a_step(model, batch, found, program, right):
            assert max(errors.values()) < 1e-12 * max(size, 1.0)


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("qwen2_5_vl", "image_grid_thw"),
        pytest.param("idefics3", "all zeros", marks=pytest.mark.slow),
    ],
)
def test_towers_whose_shapes_depend_on_values_are_right_for_those_of_the_example(
    name: str, note: str
) -> None:
    model, batch, found = captured(name)
    assert any(note in text for text in found.graph.notes)
    right = one_process(model, batch)
    size = max(float(g.abs().max()) for g in right[1].values() if g is not None)
    program = emit_uniform(found, UniformStrategy(tp=2, sequence_parallel=True), BATCH)
    read = {key: value for key, value in batch.items() if key != note}
    for errors in errors_of_a_step(model, read, found, program, right):
        assert max(errors.values()) < 1e-12 * max(size, 1.0)
