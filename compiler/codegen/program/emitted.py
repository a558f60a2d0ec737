"""The emitted program of a rank: one graph per distinct region, and the steps that run them.

    G k   start the gathers of instance k's buckets
    F k   run the region graph of instance k; inside it, once its own bucket has arrived, the
          gathers of instance `ahead` start
    X k   release the gathered parameters of instance k

The graphs name mesh axes, never ranks, so all ranks run the same program: `digest` is the same
everywhere. The backward follows from autograd, see meshfold.zero.step.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch import fx

from meshfold.codegen.program.region_schedule import RegionSchedule
from meshfold.codegen.program.text import bucket_text, graph_lines, rank_text
from meshfold.ir.bucketing import Mergeable, Place, merged_places
from meshfold.ir.mesh import Mesh
from meshfold.ir.node_groups import ACROSS_NODES, IN_NODE, Hierarchy, NodeLevels
from meshfold.ir.op_graph import ITEM_BYTES, FoldedGraph, OpGraph, SlotKind
from meshfold.ir.spmd import INVARIANT, Layout
from meshfold.ir.strategy import Recompute, RegionTyping
from meshfold.zero.parameter_group import Bucket, BucketBuffers

PLACE = "meshfold_place"
"""Key of fx.Node.meta: (value of the region, layout) that a node stands for."""

ORIGIN = "meshfold_origin"
"""Key of fx.Node.meta: the number of the op that a node is part of, or (value, step of its
conversion)."""


@dataclass(frozen=True)
class RegionProgram:
    """The graph of one region for values that arrive in the layouts `slots`.

    Placeholders of `graph`, in order: `mesh` (a RankMesh); `ahead` (a callable that starts the next
    gathers); `instance` (its number, which tells random ops apart); one bucket in flight per entry
    of `buckets`; the local tensors of `direct` slots; one float per hole of the region. It returns
    the outputs of the region as a tuple, then the new values of mutated buffers. recompute,
    keeps_gathered, whole_gradients: as in RegionTyping. ops, typing: what was emitted, those of the
    region; of one that runs in parts, those of passes.region_parts.
    """

    name: str
    region: int
    ops: OpGraph
    typing: RegionTyping
    slots: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    buckets: tuple[Bucket, ...]
    direct: tuple[int, ...]
    graph: fx.GraphModule
    recompute: Recompute = "none"
    keeps_gathered: bool = False
    whole_gradients: bool = False
    schedule: RegionSchedule | None = None
    """How it runs in `scheduled` mode, if otherwise than in eager mode."""

    @property
    def direct_names(self) -> tuple[str, ...]:
        """The placeholders of the slots passed directly."""
        names = tuple(n.name for n in self.graph.graph.nodes if n.op == "placeholder")
        first = names.index("instance") + 1 + len(self.buckets)
        return names[first : first + len(self.direct)]

    @property
    def makes_parameters(self) -> bool:
        """Whether parameters are gathered or cast for it."""
        return any(b.is_made for b in self.buckets)


@dataclass(frozen=True, slots=True)
class Step:
    """One action, see the module docstring. `ahead` (F only): -1 for none."""

    action: Literal["G", "F", "X"]
    instance: int
    ahead: int = -1

    def __str__(self) -> str:
        ahead = f"+G{self.ahead}" if self.ahead >= 0 else ""
        return f"{self.action}{self.instance}{ahead}"


@dataclass(frozen=True)
class EmittedProgram:
    """`programs[k]` is the index in `regions` of instance k's graph. typings: what was emitted, per
    region of `folded`. stored: layout in which each parameter of the folded graph lives between
    steps, by name. numbers: what tells instances apart in random ops and losses: their own, or of a
    pipeline stage those in the whole program."""

    folded: FoldedGraph
    mesh: Mesh
    typings: tuple[RegionTyping, ...]
    regions: tuple[RegionProgram, ...]
    programs: tuple[int, ...]
    steps: tuple[Step, ...]
    stored: Mapping[str, Layout]
    numbers: tuple[int, ...]
    merge_bytes: int = 0
    """Up to which reductions of gradients are merged."""
    merge_gather_bytes: int = 0
    """Up to which gathers of parameters are merged."""
    hierarchy: Hierarchy | None = None
    """Which all-reduces of gradients run in phases; None for none."""

    def region_of(self, instance: int) -> RegionProgram:
        return self.regions[self.programs[instance]]

    def parts_of(self, _: tuple[int, ...]) -> tuple["EmittedProgram", ...]:
        """The programs that a rank runs: this one."""
        return (self,)

    @property
    def levels(self) -> NodeLevels:
        """Of the mesh; one, where nothing runs in phases."""
        return NodeLevels(self.mesh, 0) if self.hierarchy is None else self.hierarchy.levels

    @property
    def whole(self) -> Layout:
        """Invariant on every axis."""
        return (INVARIANT,) * len(self.mesh.axes)

    @cached_property
    def gathered_together(self) -> tuple[tuple[Place, ...], ...]:
        """The buckets whose parameters are gathered together, see meshfold.ir.bucketing."""
        return merged_places(self._gathers(), self.merge_gather_bytes)

    @cached_property
    def reduced_together(self) -> tuple[tuple[Place, ...], ...]:
        """The buckets whose gradients are reduced together, see meshfold.ir.bucketing."""
        return merged_places(self._reductions(), self.merge_bytes)

    def _gathers(self) -> Iterator[Mergeable]:
        for k in range(len(self.programs)):
            region = self.region_of(k)
            for number, bucket in enumerate(region.buckets):
                if bucket.gather and not bucket.is_alone:
                    key = bucket.gather, bucket.dtype, region.keeps_gathered
                    num_bytes = BucketBuffers(bucket, self.mesh.sizes).whole_numel
                    yield Mergeable((k, number), key, num_bytes * ITEM_BYTES[bucket.dtype])

    def _reductions(self) -> Iterator[Mergeable]:
        for k in reversed(range(len(self.programs))):
            region = self.region_of(k)
            for number, bucket in enumerate(region.buckets):
                axes = bucket.gather or bucket.reduce
                if axes and bucket.requires_grad and not bucket.is_alone:
                    is_late = not bucket.gather or region.whole_gradients
                    dtype = bucket.master or bucket.dtype
                    key = bool(bucket.gather), axes, dtype, is_late
                    num_bytes = BucketBuffers(bucket, self.mesh.sizes).whole_numel
                    num_bytes *= ITEM_BYTES[dtype]
                    yield Mergeable((k, number), key, num_bytes)

    @cached_property
    def digest(self) -> str:
        """Hash of everything that all ranks must do alike, collectives and their order included."""
        return hashlib.sha256("\n".join(self.body()).encode()).hexdigest()

    def axis_sets(self) -> tuple[tuple[str, ...], ...]:
        """The sets of axes that the program communicates over as one group, in a fixed order."""
        names = self.mesh.names
        sets: set[tuple[str, ...]] = {
            (name,) for name, n in zip(names, self.mesh.sizes, strict=True) if n > 1
        }
        for region in self.regions:
            for bucket in region.buckets:
                sets.add(tuple(names[k] for k in bucket.gather))
                reduced = {tuple(names[k] for k in m.reduce) for m in bucket.members} - {()}
                sets |= reduced
                for axes in filter(self.levels.sizes, reduced):
                    sets |= {(*axes, IN_NODE), (*axes, ACROSS_NODES)}
        return tuple(sorted(sets - {()}))

    def text(self, rank: int = 0) -> str:
        """The program as `rank` runs it. Raises ValueError if the mesh has no such rank."""
        return "\n".join([*rank_text(self.levels, rank, self.axis_sets()), *self.body()])

    def body(self) -> Iterator[str]:
        """What all ranks run, line by line."""
        yield "steps"
        for run in self._step_runs():
            yield f"  {run}"
        together = {"gathered": self.gathered_together, "reduced": self.reduced_together}
        for what, groups in together.items():
            for places in groups:
                names = " ".join(f"{k}.{number}" for k, number in places)
                yield f"  {what} together, instance.bucket: {names}"
        if self.hierarchy is not None:
            yield f"  {self.hierarchy}"
        for k, region in enumerate(self.regions):
            instances = [i for i, p in enumerate(self.programs) if p == k]
            scope = self.folded.instances[instances[0]].scope or "the model"
            again = "; runs again in backward" if region.recompute == "full" else ""
            again += "; stays gathered for backward" if region.keeps_gathered else ""
            again += "; gradients reduced once a step" if region.whole_gradients else ""
            yield f"region {region.name}: {len(instances)} x, first {scope}{again}"
            for number, bucket in enumerate(region.buckets):
                for line in bucket_text(number, bucket, self.mesh):
                    yield f"  {line}"
            for line in graph_lines(region.graph.graph):
                yield f"  {line}"
            if region.schedule is not None:
                for line in region.schedule.lines():
                    yield f"  {line}"

    def _step_runs(self) -> Iterator[str]:
        """One line per run of instances that do alike; the steps are those of its first one."""
        by_instance: dict[int, list[Step]] = {}
        for step in self.steps:
            by_instance.setdefault(step.instance, []).append(step)
        start = 0
        count = len(self.programs)
        for k in range(1, count + 1):
            if k < count and self._alike(by_instance[start], by_instance[k], start, k):
                continue
            name = self.region_of(start).name
            where = f"instance {start}" if k == start + 1 else f"instances {start}..{k - 1}"
            more = " ..." if k > start + 1 else ""
            yield f"{name} {where}: {' '.join(map(str, by_instance[start]))}{more}"
            start = k

    def _alike(self, left: list[Step], right: list[Step], a: int, b: int) -> bool:
        def shape(steps: list[Step], at: int) -> list[tuple[str, int]]:
            return [(s.action, s.ahead - at if s.ahead >= 0 else -1) for s in steps]

        return self.programs[a] == self.programs[b] and shape(left, a) == shape(right, b)

    def parameters_of(self, instance: int, bucket: Bucket) -> list[str]:
        """Names of the parameters behind a bucket's members, for one instance."""
        sources = self.folded.instances[instance].sources
        slots = self.folded.regions[self.folded.instances[instance].region].graph.slots
        assert all(slots[m.slot].kind == SlotKind.PARAMETER for m in bucket.members)
        return [sources[m.slot].name for m in bucket.members]
