"""Events of uniform strategies on tiny models, with the program that is emitted for them."""

from dataclasses import dataclass, replace
from functools import cache

from torch import Tensor, nn

from meshfold.capture.pipeline import Captured, capture
from meshfold.codegen.emit.region import emit_typed
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.cost_models.simulation.step import simulate
from meshfold.ir.memory_estimate import MemoryEstimate
from meshfold.ir.op_graph import ITEM_BYTES
from meshfold.ir.options import Precision
from meshfold.ir.plan import TimeEstimate
from meshfold.ir.step_events import StepEvents
from meshfold.ir.strategy import UniformStrategy
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.events.program import program_events
from meshfold.passes.memory.region import MemoryModel
from meshfold.passes.price.region import RegionPrice, RegionPricer
from meshfold.passes.price.step import estimate_step
from meshfold.passes.region.typing import MeshSearch
from meshfold.validation.collective_order import collectives_of
from support.models.hugging_face import tiny_model
from support.programs.memory import EmittedStep

PROBER = OpProber()
DP = UniformStrategy(dp=4)
ZERO2 = UniformStrategy(dp=4, zero=2)
ZERO3 = UniformStrategy(dp=4, zero=3)
SEQUENCE = UniformStrategy(dp=2, tp=2, zero=3, sequence_parallel=True)
RECOMPUTED = UniformStrategy(dp=2, tp=2, zero=3, recompute="full")
STRATEGIES = (DP, ZERO2, ZERO3, SEQUENCE, RECOMPUTED)
SCALAR = 8
"""Bytes: a count of targets is not worth its place among the collectives of a loss."""


@dataclass(frozen=True, eq=False)
class Eager:
    """One program seen from all sides."""

    model: nn.Module
    batch: dict[str, Tensor]
    captured: Captured
    program: EmittedProgram
    events: StepEvents
    pricers: list[RegionPricer]
    prices: list[RegionPrice]
    time: TimeEstimate
    memory: MemoryEstimate


@cache
def eager(
    family: str,
    strategy: UniformStrategy,
    *,
    layers: int = 3,
    cluster_name: str = "local-cpu",
    precision: Precision = "model",
) -> Eager:
    """A tiny model under a uniform strategy, made once."""
    model, batch = tiny_model(family, layers=layers)
    captured = capture(model, batch, precision=precision)
    graph = captured.graph
    num_devices = strategy.dp * strategy.tp
    cluster = resolve_cluster(cluster_name, num_devices)
    mesh = build_mesh(cluster, strategy.dp, strategy.tp)
    search = MeshSearch(graph, cluster, mesh, len(next(iter(batch.values()))))
    sequence_parallel = strategy.sequence_parallel
    typed = search.solve(zero=strategy.zero, mode="sequence" if sequence_parallel else "tensor")
    typings = [replace(t, recompute=strategy.recompute) for t in typed.typings]
    pricers = [s.pricer for s in search.solutions("sequence" if sequence_parallel else "tensor")]
    prices = [
        p.price(t.slots, t.recompute, reshard_after_forward=t.reshard_after_forward)
        for p, t in zip(pricers, typings, strict=True)
    ]
    costs = search.costs
    time = estimate_step(graph, typings, prices, costs, "adamw")
    memory, _ = MemoryModel(costs, PROBER).step(
        graph,
        typings,
        optimizer="adamw",
        reserve_bytes=cluster.reserve_bytes,
        capacity_bytes=cluster.memory_bytes,
    )
    events = program_events(
        graph, typings, pricers, costs, PROBER, optimizer="adamw", optimizer_s=time.optimizer_s
    )
    program = emit_typed(graph, typings, costs)
    return Eager(model, batch, captured, program, events, pricers, prices, time, memory)


def label(strategy: UniformStrategy) -> str:
    return strategy.label


def recorded(case: Eager) -> list[tuple[str, str, int]]:
    """(kind, axes, bytes as the cost model counts them) of a step that really runs; no scalars."""
    step = EmittedStep(case.model, case.captured, case.program, case.batch)
    mesh = step.runner.mesh
    with collectives_of(mesh) as calls:
        step.train()
    found = []
    for call in calls:
        kind = call.kind.removesuffix("_in_place")
        num_bytes = ITEM_BYTES[call.dtype]
        for size in call.shape:
            num_bytes *= size
        if kind == "all_gather":
            num_bytes *= mesh.size(call.axes)
        found.append((kind, ",".join(call.axes), num_bytes))
    return [call for call in found if call[2] > SCALAR]


def predicted(case: Eager) -> list[tuple[str, str, int]]:
    transfers = [t.collective for t in simulate(case.events).transfers]
    return [(c.kind, ",".join(c.axes), c.num_bytes) for c in transfers if c.num_bytes > SCALAR]
