"""Checkpoints on the ranks of a pool, and a process that is killed while it saves one.

python -m support.processes.checkpoint FOLDER WHERE       saves once, and dies in the second save
"""

import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import meshfold
from meshfold.ir.options import CompileOptions, PinValue
from meshfold.training.compiled_model import CompiledModel
from support.programs.local_programs import stack_model


def trained(
    pins: Mapping[str, PinValue] | None = None, seed: int = 0, dropout: float = 0.3
) -> tuple[CompiledModel, torch.optim.Optimizer, Callable[[], None]]:
    """A compiled model with its optimizer, and what does a step."""
    model, batch = stack_model(4, dropout=dropout)
    if seed:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.01 * seed)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    options = CompileOptions(pins=pins or {})
    compiled = meshfold.compile(model, f"local-cpux{ranks}", batch, options=options)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.1 / (1 + seed))

    def step() -> None:
        compiled.train_step(batch)
        optimizer.step()
        optimizer.zero_grad()

    return compiled, optimizer, step


def goes_on_as_if_nothing_had_been(
    folder: str, first: Mapping[str, PinValue], second: Mapping[str, PinValue]
) -> float:
    """Largest difference of the parameters after two steps, a save, a load under another plan and a
    step, from those after three steps."""
    # A microbatch draws masks of its own.
    dropout = 0.0 if "microbatches" in {**first, **second} else 0.3
    compiled, optimizer, step = trained(first, dropout=dropout)
    step()
    step()
    meshfold.save_checkpoint(folder, compiled, optimizer)
    step()
    other, other_optimizer, other_step = trained(second, 1, dropout)
    meshfold.load_checkpoint(folder, other, other_optimizer)
    other_step()
    right, found = compiled.full_state_dict(), other.full_state_dict()
    return max(float((right[n] - found[n]).abs().max()) for n in right)


def _die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_in_a_save(folder: str, where: str) -> None:
    compiled, optimizer, step = trained()
    step()
    meshfold.save_checkpoint(folder, compiled, optimizer)
    step()
    if where == "writing":
        # The parts are there, the list of them is not.
        FileSystemWriter.finish = _die  # type: ignore[method-assign]
    else:
        rename, count = Path.rename, iter(range(9))

        def dying(self: Path, target: Path) -> Path:
            return rename(self, target) if next(count) < int(where) else _die()  # type: ignore

        Path.rename = dying  # type: ignore[method-assign, assignment]
    meshfold.save_checkpoint(folder, compiled, optimizer)
    raise AssertionError("not killed")


if __name__ == "__main__":
    torch.set_num_threads(1)
    _die_in_a_save(*sys.argv[1:])
