"""The emitted program of a rank: one graph per distinct region, and the steps that run them.

    G k   start the gathers of instance k's groups
    F k   run the region graph of instance k; inside it, once its own group has arrived, the
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

from meshfold.codegen.program.region_schedule import ChunkedBoundary, RegionSchedule
from meshfold.codegen.program.text import (
    graph_lines,
    group_text,
    rank_text,
    recomputation_text,
)
from meshfold.hierarchical_all_reduce import HierarchicalAllReduce
from meshfold.ir.bucketing import BucketMember, GroupRef, fill_buckets
from meshfold.ir.mesh import Mesh
from meshfold.ir.node_groups import ACROSS_NODES, IN_NODE, NodeLevels
from meshfold.ir.op_graph import ITEM_BYTES, FoldedGraph, OpGraph, SlotKind
from meshfold.ir.spmd import INVARIANT, Layout
from meshfold.ir.strategy import Recompute, RegionTyping
from meshfold.zero.parameter_group import GroupBuffers, ParameterGroup

CONTEXT = "context"
"""Name of the first placeholder of every graph: the StepContext."""

INSTANCE = "instance"
"""Name of the placeholder of an instance's number."""

_GROUP = "group_"

PLACE = "meshfold_place"
"""Key of fx.Node.meta: (value of the region, layout) that a node stands for."""

ORIGIN = "meshfold_origin"
"""Key of fx.Node.meta: the number of the op that a node is part of, or (value, step of its
conversion)."""


NAME = "meshfold_name"
"""Key of fx.Node.meta in the graph of a segment: the node's name in the region's graph."""


def group_name(group: int) -> str:
    """Name of the placeholder through which parameter group `group` of a region arrives."""
    return f"{_GROUP}{group}"


def group_number(placeholder: str) -> int:
    """The parameter group that arrives through this placeholder."""
    return int(placeholder.removeprefix(_GROUP))


@dataclass(frozen=True)
class RegionProgram:
    """The graph of one region for values that arrive in the layouts `slots`."""

    name: str
    region: int
    """Number of the region in the folded graph."""
    ops: OpGraph
    """The ops that were emitted: those of the region or, in micro-chunks, of
    meshfold.passes.split.micro_chunks."""
    typing: RegionTyping
    """The typing of `ops`."""
    slots: tuple[Layout, ...]
    """Layouts in which values arrive."""
    outputs: tuple[Layout, ...]
    """Layouts in which values leave."""
    groups: tuple[ParameterGroup, ...]
    direct: tuple[int, ...]
    """Slots whose local tensors are passed directly, not by a group."""
    graph: fx.GraphModule
    """Placeholders, in order: `context` (a StepContext); `ahead` (a callable that starts the next
    gathers); `instance` (its number, which tells random ops apart); one GroupUse per entry of
    `groups`; the local tensors of `direct`; one float per hole of the region. Returns the outputs
    of the region as a tuple, then the new values of mutated buffers."""
    recompute: Recompute = "none"
    """The field of RegionTyping, like the two that follow."""
    reshard_after_forward: bool = True
    accumulate_unsharded: bool = False
    schedule: RegionSchedule | None = None
    """How it runs in `scheduled` mode, if otherwise than in eager mode."""

    @property
    def direct_names(self) -> tuple[str, ...]:
        """The placeholders of the slots passed directly."""
        names = tuple(n.name for n in self.graph.graph.nodes if n.op == "placeholder")
        first = names.index(INSTANCE) + 1 + len(self.groups)
        return names[first : first + len(self.direct)]

    @property
    def materializes_parameters(self) -> bool:
        """Whether parameters are gathered or cast for it."""
        return any(b.is_materialized for b in self.groups)


@dataclass(frozen=True, slots=True)
class RegionInstance:
    """One use of a region in a program."""

    index: int
    region: RegionProgram
    number: int
    """What tells it apart in random ops and losses, see EmittedProgram.numbers."""
    floats: tuple[float, ...]
    """Its float arguments."""


@dataclass(frozen=True, slots=True)
class ProgramStep:
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
    pipeline stage those in the full program."""

    folded: FoldedGraph
    mesh: Mesh
    typings: tuple[RegionTyping, ...]
    regions: tuple[RegionProgram, ...]
    programs: tuple[int, ...]
    steps: tuple[ProgramStep, ...]
    stored: Mapping[str, Layout]
    numbers: tuple[int, ...]
    reduce_bucket_bytes: int = 0
    """Bucket size up to which reductions of gradients are coalesced; 0 for none."""
    allgather_bucket_bytes: int = 0
    """Bucket size up to which gathers of parameters are coalesced; 0 for none."""
    hierarchical: HierarchicalAllReduce | None = None
    """Which all-reduces of gradients are hierarchical; None for none."""

    offloaded: frozenset[str] = frozenset()
    """Names of the parameters that are stored and updated in the host's memory."""

    by_layer: frozenset[str] = frozenset()
    """Names of those of them that the device has only while the layer that reads them runs."""

    saved_on_host: frozenset[int] = frozenset()
    """Numbers of the folded regions whose saved activations wait in the host's memory."""

    boundaries: tuple[ChunkedBoundary, ...] = ()
    """What each instance receives and sends in chunks; empty where none does."""

    @cached_property
    def instances_saved_on_host(self) -> frozenset[int]:
        """Instances whose saved activations leave: not the last one, whose backward is next."""
        regions = [instance.region for instance in self.folded.instances]
        return frozenset(k for k, r in enumerate(regions[:-1]) if r in self.saved_on_host)

    def boundary_of(self, instance: int) -> ChunkedBoundary:
        return self.boundaries[instance] if self.boundaries else ChunkedBoundary()

    def instance(self, index: int) -> RegionInstance:
        floats = self.folded.instances[index].floats
        return RegionInstance(index, self.region_of(index), self.numbers[index], floats)

    def region_of(self, instance: int) -> RegionProgram:
        return self.regions[self.programs[instance]]

    def stage_programs(self, _: tuple[int, ...]) -> tuple["EmittedProgram", ...]:
        """The programs that a rank runs: this one."""
        return (self,)

    @property
    def levels(self) -> NodeLevels:
        """The node levels of the mesh; one where no all-reduce is hierarchical."""
        return NodeLevels(self.mesh, 0) if self.hierarchical is None else self.hierarchical.levels

    @property
    def unsharded(self) -> Layout:
        """Invariant on every axis."""
        return (INVARIANT,) * len(self.mesh.axes)

    @cached_property
    def gathered_together(self) -> tuple[tuple[GroupRef, ...], ...]:
        """The groups whose parameters are gathered together, see meshfold.ir.bucketing."""
        return fill_buckets(self._gathers(), self.allgather_bucket_bytes)

    @cached_property
    def reduced_together(self) -> tuple[tuple[GroupRef, ...], ...]:
        """The groups whose gradients are reduced together, see meshfold.ir.bucketing."""
        return fill_buckets(self._reductions(), self.reduce_bucket_bytes)

    def _gathers(self) -> Iterator[BucketMember]:
        for k in range(len(self.programs)):
            region = self.region_of(k)
            for number, group in enumerate(region.groups):
                if group.gather and not group.is_unbucketed:
                    key = group.gather, group.dtype, region.reshard_after_forward
                    num_bytes = GroupBuffers(group, self.mesh.storage.sizes).unsharded_numel
                    yield BucketMember((k, number), key, num_bytes * ITEM_BYTES[group.dtype])

    def _reductions(self) -> Iterator[BucketMember]:
        for k in reversed(range(len(self.programs))):
            region = self.region_of(k)
            for number, group in enumerate(region.groups):
                axes = group.gather or group.reduce
                if axes and group.requires_grad and not group.is_unbucketed:
                    reduce_on_last_microbatch = not group.gather or region.accumulate_unsharded
                    dtype = group.master or group.dtype
                    key = bool(group.gather), axes, dtype, reduce_on_last_microbatch
                    num_bytes = GroupBuffers(group, self.mesh.storage.sizes).unsharded_numel
                    num_bytes *= ITEM_BYTES[dtype]
                    yield BucketMember((k, number), key, num_bytes)

    @cached_property
    def digest(self) -> str:
        """Hash of everything that all ranks must do alike, collectives and their order included."""
        return hashlib.sha256("\n".join(self.body()).encode()).hexdigest()

    def axis_sets(self) -> tuple[tuple[str, ...], ...]:
        """The sets of axes that the program communicates over as one group, in a fixed order."""
        names = self.mesh.storage.names
        sets: set[tuple[str, ...]] = {
            (name,)
            for mesh in (self.mesh, self.mesh.storage)
            for name, n in zip(mesh.names, mesh.sizes, strict=True)
            if n > 1
        }
        for region in self.regions:
            for group in region.groups:
                sets.add(tuple(names[k] for k in group.gather))
                reduced = {
                    tuple(names[k] for k in m.reduce if k not in without)
                    for m in group.members
                    for without in ((), group.replicas)
                } - {()}
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
            for refs in groups:
                names = " ".join(f"{k}.{number}" for k, number in refs)
                yield f"  {what} together, instance.group: {names}"
        if self.hierarchical is not None:
            yield f"  {self.hierarchical}"
        for name in sorted(self.offloaded):
            comes = ", here while its layer runs" if name in self.by_layer else ""
            yield f"  {name}: stored and updated in the host's memory{comes}"
        for k, region in enumerate(self.regions):
            instances = [i for i, p in enumerate(self.programs) if p == k]
            scope = self.folded.instances[instances[0]].scope or "the model"
            notes = recomputation_text(region.recompute, region.typing.kept)
            if region.region in self.saved_on_host:
                notes += "; what it saves waits in the host's memory"
            notes += "" if region.reshard_after_forward else "; stays gathered for backward"
            notes += "; gradients reduced once a step" if region.accumulate_unsharded else ""
            yield f"region {region.name}: {len(instances)} x, first {scope}{notes}"
            for number, group in enumerate(region.groups):
                for line in group_text(number, group, self.mesh.storage):
                    yield f"  {line}"
            for line in graph_lines(region.graph.graph):
                yield f"  {line}"
            if region.schedule is not None:
                for line in region.schedule.text_lines():
                    yield f"  {line}"

    def _step_runs(self) -> Iterator[str]:
        """One line per run of instances that do alike; the steps are those of its first one."""
        by_instance: dict[int, list[ProgramStep]] = {}
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

    def _alike(self, left: list[ProgramStep], right: list[ProgramStep], a: int, b: int) -> bool:
        def shape(steps: list[ProgramStep], at: int) -> list[tuple[str, int]]:
            return [(s.action, s.ahead - at if s.ahead >= 0 else -1) for s in steps]

        return self.programs[a] == self.programs[b] and shape(left, a) == shape(right, b)

    def parameters_of(self, instance: int, group: ParameterGroup) -> list[str]:
        """Labels of the parameters, or slices of them, behind a group's members, for one
        instance."""
        sources = self.folded.instances[instance].sources
        slots = self.folded.regions[self.folded.instances[instance].region].graph.slots
        assert all(slots[m.slot].kind == SlotKind.PARAMETER for m in group.members)
        return [sources[m.slot].label for m in group.members]
