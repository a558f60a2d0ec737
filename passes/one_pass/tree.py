"""The decision tree: what one region may do, and the named rules that prune it before pricing.

    axes (dp x ep x cp x tp = devices) -> ranks of dp that ZeRO shards over (all, a node's)
        -> role of tp (tensor, tensor + sequence, data) -> ZeRO level on dp -> recompute -> offload

The result is a tuple of UniformStrategy. Regions of one plan share the axes; below that each takes
its own, parameter by parameter in the ZeRO level (passes/one_pass/candidates.py). Every strategy
that is left out is counted under the first rule that takes it:

    requirements   a pin, the batch, what the emitter can run: always in force
    pruning rules  take what loses; each can be switched off by name, and the optimum must stay
                   (tests/passes/one_pass/test_tree.py)
    restrictions   pruning rules that seldom take what wins; plans name them beside the gap
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from meshfold.ir.options import Mode, PinValue
from meshfold.ir.strategy import (
    SELECTIVE,
    UPDATED_BY_HOST,
    Degrees,
    Offload,
    Recompute,
    UniformStrategy,
)
from meshfold.passes.one_pass.pins import broken_pin, keeps_pins
from meshfold.passes.one_pass.pruning import Left, divisors

ZERO_LEVELS = (0, 1, 2, 3)

PINNED = "contradicts a pin"
BATCH = "batch does not divide over dp"
NO_HOST_LINK = "no figure for the link to the host"
NO_HOST_MEMORY = "no figure for the memory of the host"
NO_DISK = "no figure for the disk of the host"
IN_MEMORY = "optimizer states on disk while the host's memory is not known to be too small"
ALL_ON_DISK = "optimizer states in the host's memory, which has no room for all of them"
UNASKED_OFFLOAD = "nobody asks for offload"
NO_STATES = "the optimizer has no states to offload"
SAVED_EAGER = "activations go to the host in mode eager alone"
GATHERED_ONCE = "under ZeRO 1 and 2 parameters stay on the device between forward and backward"
NOTHING_SAVED = "full recomputation keeps nothing to offload"
SAVED_ONCE = "selective recomputation keeps activations on the device"
NODE = "tp leaves the node"
CONTEXT = "cp while the batch can be cut further"
EXPERTS = "no experts to share"
GRADIENTS = "zero 1 in one pass is zero 2"
MIXED = "tp as dp beside pinned degrees"
NO_ZERO = "dp_shard without ZeRO"
PRUNING_RULES = (NODE, CONTEXT, EXPERTS, GRADIENTS, MIXED)
"""Rules of the tree that can be switched off."""

RESTRICTIONS = (NODE, CONTEXT, MIXED, SAVED_EAGER, SAVED_ONCE, ALL_ON_DISK)
"""Rules that may take what wins: no bound covers what they leave out, and plans say so."""


@dataclass(frozen=True)
class Tree:
    """What is left of the decision tree."""

    strategies: tuple[UniformStrategy, ...]
    """The order is fixed."""

    num_strategies: int
    """Before any rule."""

    pruned: Mapping[str, int]
    """Rule -> number of strategies that it took."""


@dataclass(frozen=True)
class SearchSpec:
    """What the rules depend on."""

    num_devices: int
    devices_per_node: int
    batch_size: int
    pins: Mapping[str, PinValue]
    allow_offload: bool = False
    """Whether offload competes without a pin."""

    switched_off: Collection[str] = ()
    """Names of PRUNING_RULES."""

    host_bytes_per_s: float = 0.0
    """Rate of the link to the host, 0 if unknown."""

    host_memory_bytes_per_s: float = 0.0
    """Rate of the host's memory, 0 if unknown."""

    disk_bytes_per_s: float = 0.0
    """Rate of the host's disk, 0 if unknown."""

    states_on_disk: bool = False
    """Whether the host's memory has no room for the optimizer states of what is offloaded."""

    has_states: bool = True
    """Whether the optimizer has states."""

    has_feature_maps: bool = False
    """Whether the model passes on feature maps: they have no sequence, so tp shards the batch, also
    over several nodes and where its degree is pinned."""

    sequences: Collection[int] = ()
    """Sizes of the sequences that the model passes on; cp is offered where it divides one."""

    experts: Collection[int] = ()
    """Numbers of experts of the layers; ep is offered where it divides them all."""

    mode: Mode = "eager"
    """In which the program runs."""

    whole_batch: str = ""
    """Why a pipeline cannot split the batch, if it cannot."""

    @property
    def offers_offload(self) -> bool:
        """Whether somebody asks for it."""
        return "offload" in self.pins or self.allow_offload


def grow_tree(spec: SearchSpec) -> Tree:
    """Every strategy on all devices that no rule prunes.

    Raises OptionError naming the pin, or the batch, when none is left.
    """
    axes = Left(_choices_of_axes(spec), _num_strategies)
    num_strategies = axes.num_strategies
    axes.prune(EXPERTS, lambda degrees: _has_no_experts(degrees, spec))
    axes.prune(CONTEXT, lambda degrees: can_shard_batch(degrees, spec))
    left = Left([s for d in axes.left for s in strategies_on(d)], lambda _: 1)
    if _keeps_degrees(spec):
        left.prune(MIXED, lambda strategy: strategy.batch_on_tp)
    for name, keeps in _rules(spec):
        left.require(name, keeps, lambda name, of: _why_not(name, of, spec))
    for name, prunes in _pruning_rules(left.left, spec):
        left.prune(name, prunes)
    # A part of dp is there for what ZeRO shards in some region; others may be whole beside it.
    useful = {strategy.degrees for strategy in left.left if strategy.zero}
    left.require(
        NO_ZERO,
        lambda s: not s.dp_shard or s.degrees in useful,
        lambda name, of: (
            f"pin dp_shard={spec.pins['dp_shard']}: zero=0 shards nothing; pin zero=1 or more, or "
            "leave dp_shard out"
        ),
    )
    return Tree(tuple(left.left), num_strategies, {**axes.pruned, **left.pruned})


def _choices_of_axes(spec: SearchSpec) -> list[Degrees]:
    """dp x ep x cp x tp = devices, by rising ep, cp, then tp."""
    n = spec.num_devices
    everything = [
        Degrees(n // ep // cp // tp, cp, tp, ep)
        for ep in divisors(n)
        for cp in divisors(n // ep)
        if cp == 1 or any(size % cp == 0 for size in spec.sequences)
        for tp in divisors(n // ep // cp)
    ]
    return [x for degrees in everything for x in _choices_of_shards(degrees, spec)]


def _choices_of_shards(degrees: Degrees, spec: SearchSpec) -> list[Degrees]:
    """ZeRO over all of dp; and over a part of it (HSDP), which is pinned, or so large that every
    replica of the states is on one node, where there are several."""
    if (pinned := spec.pins.get("dp_shard")) is not None:
        size = int(pinned)
    else:
        inside = degrees.tp * degrees.cp * degrees.ep
        size = spec.devices_per_node // inside if spec.devices_per_node % inside == 0 else 1
    is_part = 1 < size < degrees.dp and degrees.dp % size == 0
    return [degrees, degrees._replace(dp_shard=size)] if is_part else [degrees]


def offered_axes(spec: SearchSpec) -> list[Degrees]:
    """The same as _choices_of_axes, with ep only where it shares something."""
    return [d for d in _choices_of_axes(spec) if not _has_no_experts(d, spec)]


def _has_no_experts(degrees: Degrees, spec: SearchSpec) -> bool:
    """Whether ep would share nothing: then it is dp by another name."""
    if EXPERTS in spec.switched_off or degrees.ep == 1:
        return False
    return not spec.experts or any(e % degrees.ep for e in spec.experts)


def may_shard_batch(spec: SearchSpec) -> bool:
    """Whether CONTEXT is asked: not where cp is pinned."""
    return CONTEXT not in spec.switched_off and "cp" not in spec.pins


def can_shard_batch(degrees: Degrees, spec: SearchSpec, microbatches: int = 1) -> bool:
    """Whether some of cp could be dp instead: both shard the same values evenly, and only cp
    communicates inside a region. (One axis saves launches against two: it may win by that where
    values are tiny.) microbatches: that the batch of a rank is split into."""
    of_rank, rest = divmod(spec.batch_size, degrees.batch_ranks * microbatches)
    return may_shard_batch(spec) and not rest and math.gcd(degrees.cp, of_rank) > 1


def strategies_on(degrees: Degrees) -> Iterator[UniformStrategy]:
    """The strategies on one choice of axes."""
    for sequence_parallel, batch_on_tp in _modes(degrees):
        for zero in _zero_levels(degrees, batch_on_tp):
            for recompute in get_args(Recompute):
                for offload in get_args(Offload):
                    yield UniformStrategy(
                        **degrees._asdict(),
                        zero=zero,
                        sequence_parallel=sequence_parallel,
                        recompute=recompute,
                        offload=offload,
                        batch_on_tp=batch_on_tp,
                    )


def _modes(degrees: Degrees) -> list[tuple[bool, bool]]:
    """What tp may do, as (sequence_parallel, batch_on_tp). Beside cp it does not
    take the batch: cp is there because there is none left to shard; nor beside ep."""
    modes = [(False, False), (True, False), (False, True)]
    takes_batch = degrees.cp == degrees.ep == 1
    return modes[: (3 if takes_batch else 2) if degrees.tp > 1 else 1]


def _zero_levels(degrees: Degrees, batch_on_tp: bool) -> tuple[int, ...]:
    shards = degrees.zero_ranks > 1 or (batch_on_tp and degrees.tp > 1)
    return ZERO_LEVELS if shards else (0,)


def _num_strategies(degrees: Degrees) -> int:
    """How many strategies_on gives."""
    below = len(get_args(Recompute)) * len(get_args(Offload))
    return below * sum(len(_zero_levels(degrees, on_tp)) for _, on_tp in _modes(degrees))


def _keeps_degrees(spec: SearchSpec) -> bool:
    """Whether MIXED is in force: who pins dp or tp wants these degrees in all layers. Feature maps
    tp shards in no other way."""
    is_pinned = "dp" in spec.pins or "tp" in spec.pins
    return is_pinned and not spec.has_feature_maps and MIXED not in spec.switched_off


def _batch_ranks(strategy: UniformStrategy, spec: SearchSpec) -> int:
    """Ranks that the batch divides over. A few regions on feature maps may run it whole on tp."""
    on_tp = strategy.tp if strategy.batch_on_tp and not spec.has_feature_maps else 1
    return strategy.degrees.batch_ranks * on_tp


_Keeps = Callable[[UniformStrategy], bool]


def _rules(spec: SearchSpec) -> list[tuple[str, _Keeps]]:
    """Requirements: (name, whether a strategy meets it)."""
    rules: list[tuple[str, _Keeps]] = [
        (PINNED, lambda strategy: keeps_pins(strategy, spec.pins)),
        (BATCH, lambda strategy: spec.batch_size % _batch_ranks(strategy, spec) == 0),
    ]
    if not spec.offers_offload:
        rules.append((UNASKED_OFFLOAD, lambda strategy: strategy.offload == "none"))
    if not spec.host_bytes_per_s:
        rules.append((NO_HOST_LINK, lambda strategy: strategy.offload == "none"))
    if not spec.host_memory_bytes_per_s:
        rules.append((NO_HOST_MEMORY, lambda s: s.offload not in UPDATED_BY_HOST))
    if spec.states_on_disk:
        rules.append((ALL_ON_DISK, lambda s: s.offload not in ("optimizer", "parameters")))
    elif "offload" not in spec.pins:
        rules.append((IN_MEMORY, lambda strategy: strategy.offload != "disk"))
    if not spec.disk_bytes_per_s:
        rules.append((NO_DISK, lambda strategy: strategy.offload != "disk"))
    if not spec.has_states:
        rules.append((NO_STATES, lambda strategy: strategy.offload not in UPDATED_BY_HOST))
    if spec.mode != "eager":
        rules.append((SAVED_EAGER, lambda strategy: strategy.offload != "activations"))
    rules.append((GATHERED_ONCE, may_come_by_layer))
    rules.append((NOTHING_SAVED, lambda s: (s.recompute, s.offload) != ("full", "activations")))
    rules.append((SAVED_ONCE, lambda s: s.recompute not in SELECTIVE or s.offload != "activations"))
    return rules


def may_come_by_layer(strategy: UniformStrategy) -> bool:
    """Whether parameters can leave the device between forward and backward, if they are to."""
    return strategy.offload != "parameters" or strategy.zero not in (1, 2)


def _pruning_rules(left: Sequence[UniformStrategy], spec: SearchSpec) -> list[tuple[str, _Keeps]]:
    """Pruning rules: (name, whether it takes a strategy), in force where not switched off.

    A tp axis that leaves the node pays the slow link in every op; it is pruned while a strategy
    inside a node, of no larger cp, is left, unless the axis may shard the batch in most regions and
    weights in few. In one pass no gradient waits for another microbatch, so ZeRO 1 is ZeRO 2.
    CONTEXT, EXPERTS and MIXED apply before.
    """
    per_node = spec.devices_per_node
    inside = min((strategy.cp for strategy in left if strategy.tp <= per_node), default=math.inf)
    everything = frozenset(left)
    rules: dict[str, _Keeps] = {
        NODE: lambda strategy: (
            inside <= strategy.cp and strategy.tp > per_node and not spec.has_feature_maps
        ),
        GRADIENTS: lambda strategy: strategy.zero == 1 and replace(strategy, zero=2) in everything,
    }
    return [(name, prunes) for name, prunes in rules.items() if name not in spec.switched_off]


def _why_not(name: str, left: Sequence[UniformStrategy], spec: SearchSpec) -> str:
    if name == PINNED:
        return broken_pin(left, spec.pins, spec.num_devices)
    if name == BATCH:
        of_dp = [strategy for strategy in left if not strategy.batch_on_tp] or left
        found = sorted({(strategy.dp, strategy.ep) for strategy in of_dp})
        choices = ", ".join(f"dp={dp}" + (f" x ep={ep}" if ep > 1 else "") for dp, ep in found)
        return (
            f"a batch of {spec.batch_size} does not divide over {choices}; "
            f"change the batch or pin another dp"
        )
    pins = _pins_text(spec)
    what_else = {
        SAVED_EAGER: f"pin {pins}: {SAVED_EAGER}; leave --mode {spec.mode} out",
        **{
            name: f"pin {pins}: {name}; leave recompute out, or pin recompute=none"
            for name in (NOTHING_SAVED, SAVED_ONCE)
        },
        GATHERED_ONCE: f"pin {pins}: {GATHERED_ONCE}; pin zero=0 or zero=3",
    }
    return {**what_else, **refused_offload(spec)}[name]


def refused_offload(spec: SearchSpec) -> dict[str, str]:
    """Why the states of the optimizer cannot go to the host, by rule, if they cannot."""
    pins, found = _pins_text(spec), {}
    if not spec.host_bytes_per_s:
        found[NO_HOST_LINK] = (
            f"pin {pins}: nothing is known about the link between device and host; give "
            "host_bytes_per_s of the devices in a cluster file"
        )
    if not spec.host_memory_bytes_per_s:
        found[NO_HOST_MEMORY] = (
            f"pin {pins}: nothing is known about the host's memory, in which the optimizer would "
            "run; give host_memory_bytes_per_s of the devices in a cluster file"
        )
    if not spec.disk_bytes_per_s and spec.pins.get("offload") == "disk":
        found[NO_DISK] = (
            f"pin {pins}: nothing is known about the host's disk, where optimizer states would be; "
            "give disk_bytes_per_s of the devices in a cluster file"
        )
    if not spec.has_states:
        found[NO_STATES] = f"pin {pins}: this optimizer has no states to offload"
    return found


def _pins_text(spec: SearchSpec) -> str:
    return ", ".join(f"{name}={value}" for name, value in spec.pins.items())
