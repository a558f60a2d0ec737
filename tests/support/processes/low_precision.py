"""Training with states in fewer bits, on the ranks of a pool and in one process."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import meshfold
from meshfold.ir.options import CompileOptions, PinValue
from meshfold.low_precision.states import LowPrecisionStates
from meshfold.training.compiled_model import CompiledModel
from support.programs.local_programs import stack_model


class Trained(NamedTuple):
    model: CompiledModel
    optimizer: LowPrecisionStates
    batch: Mapping[str, Any]

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.model.train_step(self.batch)
            self.optimizer.step()
            self.optimizer.zero_grad()

    @property
    def state_bytes(self) -> int:
        """Kept on this rank, without counts of steps."""
        states = (state.items() for state in self.optimizer.state.values())
        return sum(x.untyped_storage().nbytes() for of in states for k, x in of if k != "step")


def started(pins: Mapping[str, PinValue], precision: Any) -> Trained:
    """A stack in float64 with its optimizer."""
    model, batch = stack_model(3, dropout=0.0)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    options = CompileOptions(pins={**pins, "states": precision})
    compiled = meshfold.compile(model, f"local-cpux{ranks}", batch, options=options)
    plain = torch.optim.AdamW(compiled.parameters(), lr=0.01)
    return Trained(compiled, LowPrecisionStates(plain, precision), batch)


class Found(NamedTuple):
    """parameters: after four steps; stored_bytes, planned_bytes: of states, as kept and as the plan
    says; resumed: whether two steps, a checkpoint and two steps are bitwise the same."""

    parameters: dict[str, torch.Tensor]
    stored_bytes: int
    planned_bytes: int
    resumed: bool


def trained(pins: Mapping[str, PinValue], precision: Any, folder: str) -> Found:
    """What becomes of four steps."""
    run = started(pins, precision)
    run.step(2)
    meshfold.save_checkpoint(folder, run.model, run.optimizer)
    run.step(2)
    other = started(pins, precision)
    meshfold.load_checkpoint(folder, other.model, other.optimizer)
    other.step(2)
    right, found = run.model.full_state_dict(), other.model.full_state_dict()
    resumed = all(torch.equal(right[n], found[n]) for n in right)
    return Found(right, run.state_bytes, run.model.plan.memory.optimizer, resumed)


def all_trained(runs: list[tuple[Mapping[str, PinValue], Any]], folder: str) -> list[Found]:
    """The same for several plans, in one visit of the ranks."""
    return [trained(p, s, str(Path(folder) / str(k))) for k, (p, s) in enumerate(runs)]
