"""The first and the last autograd node of a step."""

from typing import Any

import torch
from support.programs.local_programs import capture, emit_uniform, on_ranks, stack_model

from meshfold.ir.strategy import UniformStrategy
from meshfold.zero.step import TrainingStep


def test_a_backward_begins_and_ends_once_around_all_regions(monkeypatch: Any) -> None:
    model, batch = stack_model(2)
    captured = capture(model, batch)
    program = emit_uniform(captured, UniformStrategy(dp=2, zero=3), 4)
    log: list[str] = []
    for name in ("begin_backward", "note_reduction", "finish_backward"):
        original = getattr(TrainingStep, name)

        def logged(step: Any, *args: Any, name: str = name, original: Any = original) -> Any:
            if step.mesh.rank == 0:
                log.append(name)
            return original(step, *args)

        monkeypatch.setattr(TrainingStep, name, logged)

    def run(rank: Any) -> None:
        with torch.no_grad():
            rank.loss(batch)
        log.clear()
        rank.loss(batch).backward()

    on_ranks(model, captured, program, run)
    assert log[0] == "begin_backward" and log[-1] == "finish_backward"
    assert log[1:-1] == ["note_reduction"] * (len(log) - 2) and len(log) >= 3
