"""The plan of a folded program on a cluster: price every uniform strategy, keep the fastest that
fits, set the named baselines beside it.

    candidates (passes/candidates.py) -> typing per region (passes/uniform_search.py)
        -> step time (passes/step_time.py) and peak memory (passes/region_memory.py) -> Plan

Ties are broken by (step time to seven digits, peak memory, label): same input, same plan.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields

from meshfold.cluster import ClusterSpec
from meshfold.cost_models.meshes import build_mesh, mesh_candidates
from meshfold.errors import InfeasibleError, OptionError
from meshfold.opgraph import FoldedGraph
from meshfold.options import CompileOptions
from meshfold.passes.candidates import Candidates, enumerate_candidates
from meshfold.passes.plan_assembly import Chosen, assemble_plan
from meshfold.passes.region_memory import Probe, step_memory
from meshfold.passes.step_time import estimate_step
from meshfold.passes.uniform_search import MeshSearch
from meshfold.plan import Candidate, MemoryEstimate, Plan, SearchStats
from meshfold.strategy import UniformStrategy
from meshfold.units import bytes_text

Progress = Callable[[int, int, str], None]
"""Called with (strategies priced, strategies to price, label of the last one)."""

UNSHARDED = "tp shards no weights"


def find_plan_for(
    folded: FoldedGraph,
    cluster: ClusterSpec,
    options: CompileOptions,
    *,
    model_name: str,
    batch_size: int,
    probe: Probe,
    progress: Progress | None = None,
) -> Plan:
    """The fastest uniform strategy on all devices of `cluster` that fits the memory budget.

    batch_size: global batch, the size of dim 0 of the inputs that are to be sharded. probe: what
    the memory model asks about local ops. Raises OptionError for a pin or batch that cannot be
    kept, InfeasibleError when nothing fits.
    """
    meshes = list(mesh_candidates(cluster, cluster.num_devices))
    candidates = enumerate_candidates(meshes, options.pins, batch_size)
    named = _named_baselines(cluster)
    baselines = {name: s for name, s in named.items() if batch_size % s.dp == 0}
    todo = list(dict.fromkeys((*candidates.strategies, *baselines.values())))
    pricer = _Pricer(folded, cluster, options, batch_size, probe)
    priced = {}
    for done, strategy in enumerate(todo):
        priced[strategy] = pricer.price(strategy)
        if progress is not None:
            progress(done + 1, len(todo), strategy.label)
    kept, cuts = _cut_unsharded(candidates, priced, options.pins)
    fitting = [p for p in kept if p.memory.fits]
    if not fitting:
        raise _infeasible(kept, cluster.num_devices)
    best = min(fitting, key=_order)
    return assemble_plan(
        folded,
        cluster,
        options,
        best,
        model_name=model_name,
        batch_size=batch_size,
        baselines=_baseline_rows(baselines, priced),
        stats=SearchStats(len(kept), len(kept) - len(fitting), cuts),
        notes=tuple(
            f"baseline {name} is not priced: a batch of {batch_size} does not divide over "
            f"{s.dp} ranks"
            for name, s in named.items()
            if name not in baselines
        ),
    )


class _Pricer:
    """Prices strategies of one folded program; strategies on one mesh share their searches."""

    def __init__(
        self,
        folded: FoldedGraph,
        cluster: ClusterSpec,
        options: CompileOptions,
        batch_size: int,
        probe: Probe,
    ) -> None:
        self.folded = folded
        self.cluster = cluster
        self.options = options
        self.batch_size = batch_size
        self.probe = probe
        self._searches: dict[tuple[int, int], MeshSearch] = {}

    def price(self, strategy: UniformStrategy) -> Chosen:
        degrees = (strategy.dp, strategy.tp)
        if degrees not in self._searches:
            mesh = build_mesh(self.cluster, *degrees)
            self._searches[degrees] = MeshSearch(self.folded, self.cluster, mesh, self.batch_size)
        search = self._searches[degrees]
        program = search.solve(zero=strategy.zero, sequence_parallel=strategy.sequence_parallel)
        smallest_bytes = min(group.device.memory_bytes for group in self.cluster.groups)
        memory, saved_bytes = step_memory(
            self.folded,
            program.typings,
            search.mesh,
            self.probe,
            costs=search.costs,
            optimizer=self.options.optimizer,
            reserve_bytes=max(group.device.reserve_bytes for group in self.cluster.groups),
            capacity_bytes=self.options.memory_bytes or smallest_bytes,
        )
        time = estimate_step(
            self.folded, program.typings, program.prices, search.costs, self.options.optimizer
        )
        return Chosen(strategy, search.mesh, program, time, memory, tuple(saved_bytes))


def _order(chosen: Chosen) -> tuple[float, int, str]:
    """Sort key: the better first."""
    return float(f"{chosen.time.step_s:.6e}"), chosen.memory.peak, chosen.strategy.label


def _cut_unsharded(
    candidates: Candidates,
    priced: Mapping[UniformStrategy, Chosen],
    pins: Mapping[str, int],
) -> tuple[list[Chosen], Mapping[str, int]]:
    """Leave out strategies whose tp axis shards no weights: they are data parallelism, badly."""
    everything = [priced[s] for s in candidates.strategies]
    kept = [c for c in everything if c.program.sharded_fraction > 0]
    if not kept:
        degrees = ", ".join(f"tp={d}" for d in sorted({c.strategy.tp for c in everything}))
        raise OptionError(
            f"{'pin ' if 'tp' in pins else ''}{degrees}: no parameter of this model can be sharded "
            f"over so many ranks"
        )
    cuts = Counter(candidates.cuts)
    if len(kept) < len(everything):
        cuts[UNSHARDED] = len(everything) - len(kept)
    return kept, dict(sorted(cuts.items()))


def _infeasible(kept: Sequence[Chosen], num_devices: int) -> InfeasibleError:
    best = min(kept, key=lambda c: (c.memory.peak, c.strategy.label))
    memory = best.memory
    component, size = _largest_component(memory)
    missing = memory.peak - memory.capacity
    return InfeasibleError(
        f"nothing fits in {bytes_text(memory.capacity)} per device on {num_devices} devices: the "
        f"best candidate, {best.strategy.label}, needs {bytes_text(memory.peak)}, most of it "
        f"{component} ({bytes_text(size)}); {bytes_text(missing)} are missing; "
        f"use more devices, more memory or a smaller batch",
        binding_constraint=component,
        best_candidate=best.strategy.label,
        required_bytes=memory.peak,
        available_bytes=memory.capacity,
    )


def _largest_component(memory: MemoryEstimate) -> tuple[str, int]:
    sizes = {f.name: getattr(memory, f.name) for f in fields(memory) if f.name != "capacity"}
    name = max(sizes, key=lambda n: (sizes[n], n))
    return name.replace("_", " "), sizes[name]


def _named_baselines(cluster: ClusterSpec) -> dict[str, UniformStrategy]:
    """The strategies people would try first."""
    n = cluster.num_devices
    node = min(group.devices_per_node for group in cluster.groups)
    named = {}
    if n > 1:
        named["DDP"] = UniformStrategy(dp=n)
        named["ZeRO-3"] = UniformStrategy(dp=n, zero=3)
        if node > 1 and n % node == 0:
            named["Megatron tp+sp in a node, dp outside"] = UniformStrategy(
                dp=n // node, tp=node, sequence_parallel=True
            )
    return named


def _baseline_rows(
    baselines: Mapping[str, UniformStrategy],
    priced: Mapping[UniformStrategy, Chosen],
) -> tuple[Candidate, ...]:
    rows = [_row(name, priced[strategy]) for name, strategy in baselines.items()]
    both = [c for c in priced.values() if c.strategy.dp > 1 and c.strategy.tp > 1]
    if both:
        best = min(both, key=lambda c: (not c.memory.fits, *_order(c)))
        rows.append(_row("best 2-axis uniform", best))
    return tuple(rows)


def _row(name: str, chosen: Chosen) -> Candidate:
    memory = chosen.memory
    note = "" if memory.fits else f"{bytes_text(memory.peak - memory.capacity)} too much"
    if chosen.program.sharded_fraction == 0:
        note = "; ".join(filter(None, (note, UNSHARDED)))
    return Candidate(name, chosen.strategy, chosen.time.step_s, memory.peak, memory.fits, note)
