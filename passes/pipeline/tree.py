"""The part of the decision tree that divides a model into stages and a batch into microbatches.

    pp x dp x ep x cp x tp = devices, all factorisations -> ranks of dp that ZeRO shards over (all,
        a node's) -> microbatches, all divisors of the batch
        -> role of tp (tensor, tensor + sequence)                      one candidate: its degrees
        -> ZeRO level -> recompute -> offload                          by layer

A candidate is a UniformStrategy of degrees alone; every layer then takes one of the strategies that
`strategies_of` lists. One stage and one microbatch is the tree of one_pass/tree.py. Pruning rules
are named and counted in leaves, under the first rule that applies, as there.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import get_args

from meshfold.cost_models.pipeline.schedules import Schedule, ScheduleKind
from meshfold.errors import OptionError
from meshfold.ir.stage_pins import SCHEDULE_PINS
from meshfold.ir.strategy import Offload, Recompute, UniformStrategy
from meshfold.passes.one_pass.pins import keeps_pins
from meshfold.passes.one_pass.pruning import Left, divisors
from meshfold.passes.one_pass.tree import (
    CONTEXT,
    NO_ZERO,
    NODE,
    PINNED,
    SearchSpec,
    can_shard_batch,
    may_come_by_layer,
    may_shard_batch,
    offered_axes,
    refused_offload,
)
from meshfold.passes.pipeline.parameters import PIPELINE_ZERO_LEVELS
from meshfold.passes.stages.schedules import offered_schedules, several_stages_a_device

BATCH = "batch does not divide over dp x ep x microbatches"
WHOLE_BATCH = "batch cannot be split into microbatches"
LAYERS = "more stages than layers"
SCHEDULE = "no schedule that is pinned"
CUT_EXPERTS = "experts shared where layers are cut in pieces"

Kind = tuple[int, Recompute, Offload]
"""(ZeRO level, recompute, offload) of a strategy candidate below one choice of degrees."""

DEGREE_PINS = ("pp", "dp", "ep", "cp", "tp", "dp_shard", "sp", "microbatches")


@dataclass(frozen=True)
class PipelineTree:
    """candidates: degrees that no rule prunes; kinds: that pins leave. num_strategies: before any
    rule; pruned: rule -> number of strategies that it took. num_layers: of the model; kind,
    num_virtual_stages: what pins leave of schedules, None: any."""

    candidates: tuple[UniformStrategy, ...]
    kinds: tuple[Kind, ...]
    num_strategies: int
    pruned: Mapping[str, int]
    num_layers: int
    kind: ScheduleKind | None = None
    num_virtual_stages: int | None = None

    def schedules_of(self, degrees: UniformStrategy) -> tuple[Schedule, ...]:
        """The orders in which stages may run the microbatches of `degrees`: of one stage per device
        unless a pin asks for others, which have no tight bound (several_of)."""
        offered = self._offered(degrees)
        if self.kind is None and self.num_virtual_stages is None:
            return tuple(s for s in offered if s.num_virtual_stages == 1)
        return offered

    def several_of(self, degrees: UniformStrategy) -> tuple[Schedule, ...]:
        """The orders of several stages per device that no pin asks for."""
        if self.kind is not None or self.num_virtual_stages is not None:
            return ()
        return several_stages_a_device(degrees.pp, degrees.microbatches, self.num_layers)

    def _offered(self, degrees: UniformStrategy) -> tuple[Schedule, ...]:
        sizes = degrees.pp, degrees.microbatches
        if sizes not in self._known:
            of = *sizes, self.num_layers, self.kind, self.num_virtual_stages
            self._known[sizes] = offered_schedules(*of)
        return self._known[sizes]

    @cached_property
    def _known(self) -> dict[tuple[int, int], tuple[Schedule, ...]]:
        """By stages and microbatches, which many degrees share."""
        return {}

    def strategies_of(self, degrees: UniformStrategy) -> list[UniformStrategy]:
        """What a layer may do under `degrees`."""
        return [
            replace(degrees, zero=zero, recompute=recompute, offload=offload)
            for zero, recompute, offload in self.kinds
            if zero == 0 or degrees.degrees.zero_ranks > 1
        ]

    def without_shared_experts(self) -> "PipelineTree":
        """Without ep: a cut inside of a layer may part rows from their experts, and only the region
        that they are in brings them back."""
        alone = tuple(d for d in self.candidates if d.ep == 1)
        num_pruned = sum(map(self.num_kinds, self.candidates)) - sum(map(self.num_kinds, alone))
        pruned = {**self.pruned, CUT_EXPERTS: num_pruned} if num_pruned else self.pruned
        return replace(self, candidates=alone, pruned=pruned)

    def num_kinds(self, degrees: UniformStrategy) -> int:
        """How many strategies_of are."""
        return _num_kinds(degrees, self.kinds)


def degrees_order(degrees: UniformStrategy) -> tuple[int, ...]:
    """What decides between equal bounds and equal steps of degrees."""
    d = degrees
    return d.pp, *d.degrees, d.microbatches, int(d.sequence_parallel)


def grow_pipelines(spec: SearchSpec, num_layers: int) -> PipelineTree:
    """Every candidate that no rule prunes. Raises OptionError naming the rule, and the pins, when
    none is left."""
    every_kind = _every_kind(spec)
    kinds = _kinds(spec, every_kind)
    kind, num_virtual_stages = _schedule_pins(spec)
    left = Left(list(_all_degrees(spec)), lambda d: _num_kinds(d, every_kind))
    num_strategies = left.num_strategies
    pins = {k: v for k, v in spec.pins.items() if k in DEGREE_PINS}
    rules: dict[str, Callable[[UniformStrategy], bool]] = {
        PINNED: lambda d: keeps_pins(d, pins) and _num_kinds(d, kinds) > 0,
        BATCH: lambda d: spec.batch_size % (d.degrees.batch_ranks * d.microbatches) == 0,
        WHOLE_BATCH: lambda d: not spec.whole_batch or d.dp * d.microbatches == 1,
        LAYERS: lambda d: d.pp <= num_layers,
    }
    if kind or num_virtual_stages:
        asked = kind, num_virtual_stages
        rules[SCHEDULE] = lambda d: bool(
            d.pp > 1 and offered_schedules(d.pp, d.microbatches, num_layers, *asked)
        )
    for name, keeps in rules.items():
        left.require(name, keeps, lambda name, _: _why_not(name, spec, num_layers))
    if "dp_shard" not in spec.pins and not any(zero for zero, *_ in kinds):
        left.prune(NO_ZERO, lambda d: d.dp_shard > 0)
    left.prune(CONTEXT, lambda d: _could_shard_batch(d, spec))
    per_node = spec.devices_per_node
    if NODE not in spec.switched_off and any(d.tp <= per_node for d in left.left):
        left.prune(NODE, lambda d: d.tp > per_node)
    pruned = Counter(left.pruned)
    pruned[PINNED] += left.num_strategies - sum(_num_kinds(d, kinds) for d in left.left)
    counts = {k: n for k, n in sorted(pruned.items()) if n}
    of_schedules = num_layers, kind, num_virtual_stages
    return PipelineTree(tuple(left.left), kinds, num_strategies, counts, *of_schedules)


def _could_shard_batch(degrees: UniformStrategy, spec: SearchSpec) -> bool:
    """Whether the batch could do for cp: a microbatch part of it, or all of it what cp and stages
    do, which neither communicate inside a region then nor wait for one another."""
    if degrees.cp == 1:
        return False
    axes = degrees.degrees
    over_all = axes._replace(dp=axes.dp * degrees.cp * degrees.pp, cp=1)
    return can_shard_batch(axes, spec, degrees.microbatches) or (
        may_shard_batch(spec) and spec.batch_size % over_all.batch_ranks == 0
    )


def _schedule_pins(spec: SearchSpec) -> tuple[ScheduleKind | None, int | None]:
    name, chunks = spec.pins.get("schedule"), spec.pins.get("virtual_stages")
    assert chunks is None or isinstance(chunks, int)
    return ScheduleKind(str(name)) if name else None, chunks


def _all_degrees(spec: SearchSpec) -> Iterator[UniformStrategy]:
    """pp and axes that multiply to the devices, with every number of microbatches."""
    n = spec.num_devices
    for pp in divisors(n):
        for degrees in offered_axes(replace(spec, num_devices=n // pp)):
            for m in divisors(spec.batch_size):
                if pp == m == 1:
                    continue
                for sp in (False, True) if degrees.tp > 1 else (False,):
                    yield UniformStrategy(
                        **degrees._asdict(), sequence_parallel=sp, pp=pp, microbatches=m
                    )


def _every_kind(spec: SearchSpec) -> tuple[Kind, ...]:
    """What layers may do, pins about ZeRO and recomputation aside."""
    return tuple(
        (zero, recompute, offload)
        for zero, recompute, offload in itertools.product(
            PIPELINE_ZERO_LEVELS, get_args(Recompute), _offloads(spec)
        )
        if may_come_by_layer(UniformStrategy(zero=zero, offload=offload))
    )


def _offloads(spec: SearchSpec) -> tuple[Offload, ...]:
    """What layers may have on the host. Raises OptionError for a pin that cannot be kept."""
    pinned = spec.pins.get("offload", "" if spec.allow_offload else "none")
    if pinned == "none":
        return ("none",)
    if pinned == "activations":
        raise OptionError(
            "pin offload=activations: not in a pipeline; leave it out, or pin pp=1 and "
            "microbatches=1"
        )
    refused = list(refused_offload(spec).values())
    if pinned and refused:
        raise OptionError(refused[0])
    offered: tuple[Offload, ...] = get_args(Offload)
    if pinned:
        return tuple(x for x in offered if x == pinned)
    on_host = ("disk",) if spec.states_on_disk else ("optimizer", "parameters")
    return tuple(x for x in offered if x == "none" or (x in on_host and not refused))


def _kinds(spec: SearchSpec, every_kind: Sequence[Kind]) -> tuple[Kind, ...]:
    others = (*DEGREE_PINS, *SCHEDULE_PINS, "offload")
    pins = {k: v for k, v in spec.pins.items() if k not in others}
    return tuple(
        (zero, r, offload)
        for zero, r, offload in every_kind
        if keeps_pins(UniformStrategy(zero=zero, recompute=r), pins)
    )


def _num_kinds(degrees: UniformStrategy, kinds: Sequence[Kind]) -> int:
    """How many may be below `degrees`: ZeRO needs ranks to shard over."""
    if degrees.degrees.zero_ranks > 1:
        return len(kinds)
    return sum(zero == 0 for zero, *_ in kinds)


def _why_not(name: str, spec: SearchSpec, num_layers: int) -> str:
    pins = ", ".join(f"{key}={value}" for key, value in spec.pins.items()) or "no pins"
    size, devices = spec.batch_size, spec.num_devices
    why = {
        PINNED: (
            f"no pp x dp x ep x cp x tp on {devices} devices with microbatches that divide a batch "
            f"of {size} keeps them; ep divides the number of experts, cp the sequence"
        ),
        BATCH: f"a batch of {size} does not divide over dp x ep x microbatches",
        WHOLE_BATCH: spec.whole_batch,
        LAYERS: f"the model has {num_layers} layers, fewer than stages",
        SCHEDULE: (
            f"no pp > 1 and microbatches have such a schedule for {num_layers} layers; interleaved "
            "ones need 2 or more virtual stages per device, a multiple of pp microbatches and as "
            "many layers as stages, zbv and dualpipev 2 and 2 pp layers, the others have one"
        ),
    }
    return f"pipeline with {pins}: {why[name]}"
