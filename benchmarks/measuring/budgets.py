"""Random plans under a budget of memory, and what the step of their program takes.

A draw is a small model, a number of ranks, a mechanism that saves memory and a budget between what
the mechanism needs without one and half of that. The plan is emitted and one rank of each stage
runs steps of AdamW without its peers: what is resident, and the worst moment of a step as the
allocator has it, must not be above the budget. oneDNN is to be off: its convolutions take scratch
memory that no dispatcher sees.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, cast

import torch
from support.models.hugging_face import FAMILIES
from support.processes.offload import cluster_with_hosts
from support.programs.local_programs import local_part
from support.programs.memory import EchoMesh, allocator_peak_bytes
from support.programs.out_of_sight import Far, FarLink, NoPeers
from support.programs.pipeline import model_and_batch
from torch import nn

from meshfold.api import plan_captured
from meshfold.capture.pipeline import Captured, capture
from meshfold.codegen.emit.pipeline import EmittedPipeline, emit_plan
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.errors import InfeasibleError, OptionError
from meshfold.ir.options import CompileOptions, PinValue
from meshfold.ir.plan import Plan
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.planner.shared_work import SharedWork
from meshfold.runtime.batches import BatchReader
from meshfold.runtime.pipeline_runner import PipelineRunner
from meshfold.runtime.runner import ProgramRunner
from meshfold.runtime.stage_p2p import StageLinks

NUM_LAYERS = 2
SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
"""Of what a plan takes beside the reserve where its budget is ample."""

Pins = Mapping[str, PinValue]

MECHANISMS: Mapping[str, tuple[int, Callable[[int], Pins]]] = {
    "free": (1, lambda n: {}),
    "zero 1 to 3": (2, lambda n: {"dp": n}),
    "zero 3": (2, lambda n: {"dp": n, "zero": 3}),
    "recompute full": (1, lambda n: {"dp": n, "recompute": "full"}),
    "recompute selective": (1, lambda n: {"dp": n, "recompute": "selective"}),
    "tensor parallel": (2, lambda n: {"tp": n}),
    "microbatches": (1, lambda n: {"dp": n, "microbatches": 2}),
    "pipeline": (2, lambda n: {"pp": 2, "dp": n // 2}),
    "chunked loss": (1, lambda n: {"dp": n, "chunked_loss": 1}),
    "slices": (2, lambda n: {"dp": n, "slices": 4}),
    "offload optimizer": (1, lambda n: {"dp": n, "offload": "optimizer", "microbatches": 1}),
    "offload activations": (1, lambda n: {"dp": n, "offload": "activations"}),
}
"""Least ranks, and pins for n of them."""


@dataclass(frozen=True)
class Draw:
    """One case. share: of SHARES; where nothing fits in it, the next larger one is taken."""

    family: str
    mechanism: str
    num_ranks: int
    share: float


@dataclass(frozen=True)
class Outcome:
    """Bytes of the rank that is furthest above its prediction; those of the reserve left out."""

    draw: Draw
    strategy: str
    budget: int
    predicted: int
    counted: int

    @property
    def error(self) -> float:
        """predicted / counted - 1."""
        return self.predicted / self.counted - 1

    @property
    def fits(self) -> bool:
        return self.counted <= self.budget


@dataclass(eq=False)
class Models:
    """Captured models, and what searches for them share."""

    probe: OpProber = field(default_factory=OpProber)
    captured: dict[str, tuple[nn.Module, dict[str, Any], Captured]] = field(default_factory=dict)
    shared: dict[tuple[str, int], SharedWork] = field(default_factory=dict)

    def of(self, family: str) -> tuple[nn.Module, dict[str, Any], Captured]:
        """A model in float32, its batch and its program."""
        if family not in self.captured:
            model, batch = model_and_batch(family, NUM_LAYERS)
            model = model.float()
            batch = {k: x.float() if x.is_floating_point() else x for k, x in batch.items()}
            self.captured[family] = model, batch, capture(model, batch)
        return self.captured[family]


def drawn(count: int, seed: int = 0) -> list[Draw]:
    """Cases at random, every mechanism about as often."""
    rng, found = random.Random(seed), []
    for k in range(count):
        mechanism = [*MECHANISMS][k % len(MECHANISMS)]
        sizes = [n for n in (1, 2, 4) if n >= MECHANISMS[mechanism][0]]
        found.append(Draw(rng.choice(FAMILIES), mechanism, rng.choice(sizes), rng.choice(SHARES)))
    return found


def outcome(draw: Draw, models: Models) -> Outcome | None:
    """What the plan of a draw takes; None where the model has no such plan, or it cannot run."""
    model, batch, captured = models.of(draw.family)
    cluster = cluster_with_hosts(draw.num_ranks)
    shared = models.shared.setdefault((draw.family, draw.num_ranks), SharedWork())
    pins = {"offload": "none", **MECHANISMS[draw.mechanism][1](draw.num_ranks)}

    def plan(budget: int | None) -> Plan:
        options = CompileOptions(pins=pins, memory_bytes=budget)
        return plan_captured(
            captured, draw.family, cluster, options, probe=models.probe, shared=shared
        )

    try:
        ample = plan(None)
    except (InfeasibleError, OptionError):
        return None
    reserve = ample.memory.reserve
    for share in sorted({s for s in SHARES if s >= draw.share}):
        budget = reserve + round(share * (ample.memory.peak - reserve))
        try:
            found = plan(budget)
        except InfeasibleError:
            continue
        predicted, counted = _worst(found, model, batch, captured)
        return Outcome(
            replace(draw, share=share), found.strategy.label, budget - reserve, predicted, counted
        )
    return None


def _worst(
    plan: Plan, model: nn.Module, batch: dict[str, Any], captured: Captured
) -> tuple[int, int]:
    """(predicted, counted) of the first rank of the stage that is furthest above its prediction."""
    program = emit_plan(captured.graph, plan)
    found = []
    num_devices = plan.mesh.sizes[0] if plan.mesh.names[:1] == ("pp",) else 1
    for device in range(num_devices):
        rank = device * (plan.mesh.num_ranks // num_devices)
        costs = plan.stages[device].costs
        memory = costs.memory if costs is not None and costs.memory is not None else plan.memory
        counted = TrainingRank(program, rank, model, batch, captured).counted_bytes()
        found.append((memory.peak - memory.reserve, counted))
    return max(found, key=lambda pair: pair[1] / pair[0])


class TrainingRank:
    """A rank of a program that trains without its peers."""

    def __init__(
        self,
        program: EmittedProgram | EmittedPipeline,
        rank: int,
        model: nn.Module,
        batch: Mapping[str, torch.Tensor],
        captured: Captured,
    ) -> None:
        self.mesh = EchoMesh(program.mesh, rank, torch.device("cpu"), program.levels)
        parts, own = _programs(program, self.mesh)
        stored = {name: part for part in own for name in part.stored}
        self.parameters = {
            name: nn.Parameter(local_part(part, name, model.get_parameter(name), self.mesh))
            for name, part in stored.items()
        }
        self.buffers = {b.name: model.get_buffer(b.name).clone() for b in captured.graph.buffers}
        self.constants = captured.constants
        self.inputs = BatchReader(parts, self.mesh, {}).read(batch)
        splits = math.prod(a.size for a in program.mesh.axes if a.name in ("dp", "ep"))
        self.input_bytes = sum(x.nbytes for x in batch.values()) // splits
        self.run = self._runner(program)
        self.optimizer: torch.optim.Optimizer | None = None
        if not own[0].offloaded:
            self.optimizer = torch.optim.AdamW(self.parameters.values(), foreach=True)

    def _runner(self, program: EmittedProgram | EmittedPipeline) -> Callable[[], object]:
        """Forward and backward."""
        if isinstance(program, EmittedPipeline):
            pipeline = PipelineRunner(program, self.mesh, self.constants)
            if program.schedule.num_devices > 1:
                pipeline.links = cast(StageLinks, NoPeers())
            return lambda: pipeline.run(self.parameters, self.buffers, self.inputs)
        runner = ProgramRunner(program, self.mesh, self.constants)
        if program.saved_on_host:
            runner.host_link = FarLink()
        if program.offloaded:
            runner.host_side = Far(program, self.parameters)
        return lambda: runner.run(self.parameters, self.buffers, self.inputs).backward()

    def step(self) -> None:
        """A step; gradients go at its end."""
        self.run()
        if self.optimizer is not None:
            self.optimizer.step()
        for parameter in self.parameters.values():
            parameter.grad = None

    def counted_bytes(self) -> int:
        """All that is resident, and the worst moment of a step."""
        self.step()
        states = [
            x
            for state in (self.optimizer.state.values() if self.optimizer else ())
            for x in state.values()
            if isinstance(x, torch.Tensor) and x.dim() > 0
        ]
        resident = [*self.parameters.values(), *self.buffers.values(), *states]
        resident += self.constants.values()
        worst = allocator_peak_bytes(self.step)
        return sum(x.nbytes for x in resident) + self.input_bytes + worst


def _programs(
    program: EmittedProgram | EmittedPipeline, mesh: EchoMesh
) -> tuple[Sequence[EmittedProgram], Sequence[EmittedProgram]]:
    """The programs of all stages, and those of this rank."""
    if isinstance(program, EmittedProgram):
        return (program,), (program,)
    own = program.schedule.stages_of(program.device_of(mesh.coords))
    return program.stages, [program.stages[s] for s in own]


def summary(outcomes: Sequence[Outcome]) -> list[str]:
    """A line per mechanism: mean and worst errors, and how many are above their budget."""
    lines = [f"{'mechanism':<22}{'plans':>6}{'mean':>9}{'lowest':>9}{'highest':>9}{'above':>7}"]
    for mechanism in MECHANISMS:
        of = [x for x in outcomes if x.draw.mechanism == mechanism]
        if of:
            errors, above = [x.error for x in of], sum(not x.fits for x in of)
            lines.append(
                f"{mechanism:<22}{len(of):>6}{fmean(errors):>+9.2%}{min(errors):>+9.2%}"
                f"{max(errors):>+9.2%}{above:>7}"
            )
    return lines
