"""Events of uniform strategies on tiny models, with the program that is emitted for them."""

from dataclasses import dataclass, replace
from functools import cache

from support_models import tiny_model
from torch import Tensor, nn

from meshfold.capture import Captured, capture
from meshfold.cost_models.devices import resolve_cluster
from meshfold.cost_models.meshes import build_mesh
from meshfold.emit import emit_typed
from meshfold.options import Precision
from meshfold.passes.program_events import program_events
from meshfold.passes.region_memory import step_memory
from meshfold.passes.region_price import RegionPrice, RegionPricer
from meshfold.passes.step_time import estimate_step
from meshfold.passes.uniform_search import MeshSearch
from meshfold.plan import MemoryEstimate, TimeEstimate
from meshfold.probe import OpProber
from meshfold.program import EmittedProgram
from meshfold.step_events import StepEvents
from meshfold.strategy import UniformStrategy

PROBER = OpProber()


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
    typed = search.solve(zero=strategy.zero, sequence_parallel=sequence_parallel)
    typings = [replace(t, recompute=strategy.recompute) for t in typed.typings]
    pricers = [s.pricer for s in search.solutions(sequence_parallel=sequence_parallel)]
    prices = [
        p.price(t.slots, t.recompute, keeps_gathered=t.keeps_gathered)
        for p, t in zip(pricers, typings, strict=True)
    ]
    costs = search.costs
    time = estimate_step(graph, typings, prices, costs, "adamw")
    memory, _ = step_memory(
        graph,
        typings,
        mesh,
        PROBER,
        costs=costs,
        optimizer="adamw",
        reserve_bytes=cluster.reserve_bytes,
        capacity_bytes=cluster.memory_bytes,
    )
    events = program_events(
        graph, typings, pricers, costs, PROBER, optimizer="adamw", optimizer_s=time.optimizer_s
    )
    program = emit_typed(graph, typings, mesh, costs)
    return Eager(model, batch, captured, program, events, pricers, prices, time, memory)
