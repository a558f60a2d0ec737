"""Checkpoints on the ranks of a pool, and processes that are killed while they save one."""

import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import meshfold
from meshfold.checkpoint_files.folder import CHECKSUMS
from meshfold.ir.options import CompileOptions, PinValue
from meshfold.training.compiled_model import CompiledModel
from meshfold.training.shards.local_shard import local_tensor
from support.models.factories import deep
from support.programs.local_programs import stack_model

FILE_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.scandir", "os.listdir"}


def trained(
    pins: Mapping[str, PinValue] | None = None,
    seed: int = 0,
    dropout: float = 0.3,
    kind: str = "AdamW",
) -> tuple[CompiledModel, torch.optim.Optimizer, Callable[[], None]]:
    """A compiled model with its optimizer, a class of torch.optim, and what does a step."""
    model, batch = stack_model(4, dropout=dropout)
    if seed:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.01 * seed)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    options = CompileOptions(pins=pins or {}, optimizer=kind.lower())
    compiled = meshfold.compile(model, f"local-cpux{ranks}", batch, options=options)
    optimizer = getattr(torch.optim, kind)(compiled.parameters(), lr=0.1 / (1 + seed))

    def step() -> None:
        compiled.train_step(batch)
        optimizer.step()
        optimizer.zero_grad()

    return compiled, optimizer, step


class Run(NamedTuple):
    """What `trained` returns, after one step."""

    model: CompiledModel
    optimizer: torch.optim.Optimizer

    @staticmethod
    def started(seed: int = 0) -> "Run":
        model, optimizer, step = trained(seed=seed)
        step()
        return Run(model, optimizer)

    def save(self, folder: Path, extra: Any = None) -> None:
        meshfold.save_checkpoint(folder, self.model, self.optimizer, extra=extra)

    def load(self, folder: Path) -> Any:
        return meshfold.load_checkpoint(folder, self.model, self.optimizer)

    def contents(self) -> dict[str, Any]:
        return contents(self.model, self.optimizer)


class Dangerous:
    """Makes a folder where it is unpickled."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


def rewritten(folder: Path, change: Callable[[Any], None]) -> None:
    """Change the index of a checkpoint, with checksums that are right."""
    (index,) = folder.glob("*-index.json")
    data = json.loads(index.read_bytes())
    change(data)
    index.write_text(json.dumps(data))
    sums = (folder / CHECKSUMS).read_text().splitlines()
    kept = [line for line in sums if index.name not in line]
    digest = sha256(index.read_bytes()).hexdigest()
    (folder / CHECKSUMS).write_text("\n".join([*kept, f"{digest}  {index.name}", ""]))


def goes_on_as_if_nothing_had_been(
    folder: str,
    first: Mapping[str, PinValue],
    second: Mapping[str, PinValue],
    kind: str = "AdamW",
) -> float:
    """Largest difference of the parameters after two steps, a save, a load under another plan and a
    step, from those after three steps."""
    # A microbatch draws masks of its own.
    dropout = 0.0 if "microbatches" in {**first, **second} else 0.3
    compiled, optimizer, step = trained(first, dropout=dropout, kind=kind)
    step()
    step()
    meshfold.save_checkpoint(folder, compiled, optimizer)
    step()
    other, other_optimizer, other_step = trained(second, 1, dropout, kind)
    meshfold.load_checkpoint(folder, other, other_optimizer)
    other_step()
    right, found = compiled.full_state_dict(), other.full_state_dict()
    return max(float((right[n] - found[n]).abs().max()) for n in right)


def refusals_of_ranks(folder: str) -> tuple[dict[str, Tensor], list[str]]:
    """What two ranks saved, and the lines in which they refuse what goes wrong on the second one
    alone. Raises AssertionError unless each leaves model and checkpoint as they were."""
    compiled, optimizer, step = trained({"dp": 2, "zero": 3})
    step()
    meshfold.save_checkpoint(folder, compiled, optimizer, extra={"step": 1})
    saved = compiled.full_state_dict()
    names = sorted(os.listdir(folder))
    step()
    lines = [
        _refusal(partial(_save_on_a_full_disk, folder, compiled, optimizer)),
        _refusal(partial(meshfold.save_checkpoint, folder, compiled, extra=dist.get_rank())),
        _refusal(partial(meshfold.save_checkpoint, folder, compiled, extra={1, dist.get_rank()})),
    ]
    assert sorted(os.listdir(folder)) == names
    before = contents(compiled, optimizer)
    damaged = Path(folder) / next(name for name in names if "-00001-of-" in name)
    original = damaged.read_bytes()
    dist.barrier()
    if dist.get_rank() == 1:
        damaged.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
    dist.barrier()
    lines.append(_refusal(partial(meshfold.load_checkpoint, folder, compiled, optimizer)))
    assert same(contents(compiled, optimizer), before)
    if dist.get_rank() == 1:
        damaged.write_bytes(original)
    dist.barrier()
    assert meshfold.load_checkpoint(folder, compiled, optimizer) == {"step": 1}
    assert all(torch.equal(x, saved[n]) for n, x in compiled.full_state_dict().items())
    return saved, lines


def _save_on_a_full_disk(*arguments: Any) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    flush = os.fsync
    if dist.get_rank() == 1:
        os.fsync = full
    try:
        meshfold.save_checkpoint(*arguments)
    finally:
        os.fsync = flush


def _refusal(work: Callable[[], object]) -> str:
    try:
        work()
    except meshfold.MeshfoldError as error:
        return str(error)
    raise AssertionError("not refused")


def contents(model: CompiledModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A copy of all that a load may change here."""
    found: dict[str, Any] = {
        n: local_tensor(x.detach()).clone() for n, x in model.named_parameters()
    }
    found["num_forwards"] = model.num_forwards
    for k, group in enumerate(optimizer.param_groups):
        found |= {f"{k} {key}": value for key, value in group.items() if key != "params"}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name} {key}"] = (
                local_tensor(value).clone() if isinstance(value, Tensor) else value
            )
    return found


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether they agree to the bit."""
    return one.keys() == other.keys() and all(
        torch.equal(x, other[n]) if isinstance(x, Tensor) else x == other[n] for n, x in one.items()
    )


def filled(model: CompiledModel, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Make everything that is saved this number."""
    model.num_forwards = number
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(number)
            for value in optimizer.state[parameter].values():
                value.fill_(number)


def killed(work: Callable[[], object], folder: Path, *, at: int | None, delay_s: float) -> bool:
    """Run `work` in a copy of this process and kill that, before its `at`-th operation on files
    below `folder` or after some time. Returns whether it was killed, or else had ended."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        if at is not None:
            left = iter(range(at))

            def audit(event: str, arguments: tuple[Any, ...]) -> None:
                is_there = any(str(a).startswith(str(folder)) for a in arguments)
                if event in FILE_EVENTS and is_there and next(left, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(audit)
        try:
            work()
        finally:
            os._exit(0)
    if at is None:
        time.sleep(delay_s)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL)
    return status != 0


def trained_deep(
    sharing: str, pins: Mapping[str, PinValue]
) -> tuple[CompiledModel, torch.optim.Optimizer, Callable[[], Tensor]]:
    """A model whose blocks share parameters as `sharing` says (support.models.factories.Deep), with
    its optimizer, and what does a step and returns its loss."""
    torch.manual_seed(len(sharing))
    model, batch = deep(sharing)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    options = CompileOptions(pins=pins)
    compiled = meshfold.compile(model, f"local-cpux{ranks}", batch, options=options)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.01)

    def step() -> Tensor:
        loss = compiled.train_step(batch).detach()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return compiled, optimizer, step


def delinks(folder: str, sharing: str, pins: Mapping[str, PinValue]) -> tuple[float, float]:
    """Losses of the step behind a checkpoint of shared blocks: as it goes on, and of what is
    delinked from it, under one plan. Called on all ranks together; rank 0 delinks."""
    path, out = Path(folder) / "shared", Path(folder) / "released"
    model, optimizer, step = trained_deep(sharing, pins)
    for _ in range(2):
        step()
    meshfold.save_checkpoint(path, model, optimizer)
    if not dist.is_initialized() or dist.get_rank() == 0:
        (shared, batch), (released, _) = deep(sharing), deep()
        meshfold.delink(path, out, shared, released, batch)
    if dist.is_initialized():
        dist.barrier()
    own, states, delinked_step = trained_deep("none", pins)
    meshfold.load_checkpoint(out, own, states)
    return float(step()), float(delinked_step())
