"""The strategies that people would try first, priced beside the plan."""

from collections.abc import Mapping, Sequence

from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.plan import Candidate
from meshfold.ir.strategy import UniformStrategy
from meshfold.passes.one_pass.planner import MeshPlanner
from meshfold.passes.one_pass.priced import Priced, order_of
from meshfold.units import bytes_text

NUM_UNIFORM = 8
"""Uniform strategies per mesh whose exact figures are taken, the most promising first."""


def named_baselines(cluster: ClusterSpec) -> dict[str, UniformStrategy]:
    """Name -> strategy on all devices."""
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


def baseline_rows(
    named: Mapping[str, Priced], planners: Sequence[MeshPlanner]
) -> tuple[Candidate, ...]:
    """One row per named baseline, and the best uniform strategy on the meshes of `planners`."""
    rows = [_row(name, priced) for name, priced in named.items()]
    uniform = [p for planner in planners for p in _most_promising(planner)]
    if uniform:
        best = min(uniform, key=lambda p: (not p.memory.fits, *order_of(p)))
        rows.append(_row("best uniform strategy", best))
    return tuple(rows)


def _most_promising(planner: MeshPlanner) -> list[Priced]:
    """Exact figures of uniform strategies in order of their time, up to the first that fits; those
    whose states and activations alone do not are left out."""
    found: list[Priced] = []
    ordered = planner.uniform_by_time()
    possible = [s for s in ordered if planner.uniform_bytes(s) <= planner.capacity_bytes]
    for strategy in (possible or ordered)[:NUM_UNIFORM]:
        found.append(planner.uniform(strategy))
        if found[-1].memory.fits:
            break
    return found


def _row(name: str, priced: Priced) -> Candidate:
    memory = priced.memory
    note = "" if memory.fits else f"{bytes_text(memory.peak - memory.capacity)} too much"
    return Candidate(name, priced.strategy, priced.time.step_s, memory.peak, memory.fits, note)
