"""The decision tree: what one region may do, and the named rules that cut branches before pricing.

    axes (dp x ep x cp x tp = devices) -> role of tp (tensor, tensor + sequence, data)
        -> ZeRO level on dp -> recompute -> offload

A leaf is a UniformStrategy. Regions of one plan share the axes; below that each takes a leaf of its
own, parameter by parameter in the ZeRO level (passes/leaf_costs.py). Every leaf that is left out is
counted under the first rule that cuts it:

    requirements   a pin, the batch, what the emitter can run: always in force
    prunings       hold what is known to lose; each can be switched off by name, and the optimum
                   must stay (tests/passes/test_decision_tree.py)
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from meshfold.errors import OptionError
from meshfold.ir.options import PinValue
from meshfold.ir.strategy import Degrees, Offload, Recompute, UniformStrategy
from meshfold.passes.mesh_degrees import divisors

ZERO_LEVELS = (0, 1, 2, 3)

PINNED = "contradicts a pin"
BATCH = "batch does not divide over dp"
PLANNED = "cannot run yet"
NO_HOST_LINK = "no figure for the link to the host"
NO_STATES = "the optimizer has no states to offload"
NODE = "tp leaves the node"
NOTHING_KEPT = "full recomputation keeps nothing to offload"
CONTEXT = "cp while the batch can be cut further"
EXPERTS = "no experts to share"
GRADIENTS = "zero 1 in one pass is zero 2"
PRUNINGS = (NODE, NOTHING_KEPT, CONTEXT, EXPERTS, GRADIENTS)
"""Rules of the tree that can be switched off."""


@dataclass(frozen=True)
class Tree:
    """leaves in a fixed order; num_leaves before any cut; cuts: rule -> number of leaves."""

    leaves: tuple[UniformStrategy, ...]
    num_leaves: int
    cuts: Mapping[str, int]


@dataclass(frozen=True)
class Situation:
    """What cuts depend on. allow_planned: keep leaves that can be planned but not run yet.
    switched_off: names of PRUNINGS. host_bytes_per_s: of the link to the host, 0 if unknown.
    has_states: whether the optimizer has states. has_feature_maps: whether the model passes on
    feature maps: they have no sequence, so what tp cuts instead is the batch. sequences: sizes of
    the sequences that it passes on; cp is offered where it divides one. experts: numbers of experts
    of its layers; ep is offered where it divides them all, and not beside cp."""

    num_devices: int
    devices_per_node: int
    batch_size: int
    pins: Mapping[str, PinValue]
    allow_planned: bool = False
    switched_off: Collection[str] = ()
    host_bytes_per_s: float = 0.0
    has_states: bool = True
    has_feature_maps: bool = False
    sequences: Collection[int] = ()
    experts: Collection[int] = ()


def grow_tree(situation: Situation) -> Tree:
    """Every leaf on all devices that no rule cuts.

    Raises OptionError naming the pin, or the batch, when none is left.
    """
    maps = situation.has_feature_maps
    choices = _choices_of_axes(situation)
    num_leaves = sum(_num_leaves(d, maps) for d in choices)
    cuts: Counter[str] = Counter()
    for name, is_cut in ((EXPERTS, _has_no_experts), (CONTEXT, can_cut_batch)):
        offered = [d for d in choices if not is_cut(d, situation)]
        cuts[name] = sum(_num_leaves(d, maps) for d in choices if d not in offered)
        choices = offered
    everything = [leaf for degrees in choices for leaf in leaves_on(degrees, maps=maps)]
    left = everything
    for name, keeps in _rules(situation):
        kept = [leaf for leaf in left if keeps(leaf)]
        if not kept:
            raise OptionError(_why_not(name, left, situation))
        cuts[name] = len(left) - len(kept)
        left = kept
    for name, cut in _prunings(left, situation):
        kept = [leaf for leaf in left if not cut(leaf)]
        cuts[name] = len(left) - len(kept)
        left = kept
    return Tree(tuple(left), num_leaves, {k: n for k, n in sorted(cuts.items()) if n})


def _choices_of_axes(situation: Situation) -> list[Degrees]:
    """dp x ep x cp x tp = devices, by rising ep, cp, then tp."""
    n = situation.num_devices
    without = [
        Degrees(n // cp // tp, cp, tp)
        for cp in divisors(n)
        if cp == 1 or any(size % cp == 0 for size in situation.sequences)
        for tp in divisors(n // cp)
    ]
    return without + [
        Degrees(n // ep // tp, 1, tp, ep) for ep in divisors(n)[1:] for tp in divisors(n // ep)
    ]


def offered_axes(situation: Situation) -> list[Degrees]:
    """As _choices_of_axes, with ep only where it shares something."""
    return [d for d in _choices_of_axes(situation) if not _has_no_experts(d, situation)]


def _has_no_experts(degrees: Degrees, situation: Situation) -> bool:
    """Whether ep would share nothing: then it is dp by another name."""
    if EXPERTS in situation.switched_off or degrees.ep == 1:
        return False
    return not situation.experts or any(e % degrees.ep for e in situation.experts)


def may_cut_for_batch(situation: Situation) -> bool:
    """Whether CONTEXT is asked: not where cp is pinned."""
    return CONTEXT not in situation.switched_off and "cp" not in situation.pins


def can_cut_batch(degrees: Degrees, situation: Situation, microbatches: int = 1) -> bool:
    """Whether part of cp could be dp instead: both cut the same values evenly, and
    only cp communicates inside a region. (One axis saves launches against two: it may win by
    that where values are tiny.) microbatches: parts that a rank runs its share of the batch in."""
    of_rank, rest = divmod(situation.batch_size, degrees.batch_ranks * microbatches)
    return may_cut_for_batch(situation) and not rest and math.gcd(degrees.cp, of_rank) > 1


def leaves_on(degrees: Degrees, *, maps: bool = False) -> Iterator[UniformStrategy]:
    """The leaves below one choice of axes. maps: whether tp may take the batch, see Situation."""
    for sequence_parallel, batch_on_tp in _modes(degrees, maps):
        for zero in _zero_levels(degrees):
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


def _modes(degrees: Degrees, maps: bool) -> list[tuple[bool, bool]]:
    """What tp may do, as (sequence_parallel, batch_on_tp). Beside cp it does not
    take the batch: cp is there because there is none left to cut; nor beside ep."""
    modes = [(False, False), (True, False), (False, True)]
    takes_batch = maps and degrees.cp == degrees.ep == 1
    return modes[: (3 if takes_batch else 2) if degrees.tp > 1 else 1]


def _zero_levels(degrees: Degrees) -> tuple[int, ...]:
    return ZERO_LEVELS if degrees.zero_ranks > 1 else (0,)


def _num_leaves(degrees: Degrees, maps: bool) -> int:
    """Of leaves_on."""
    below = len(get_args(Recompute)) * len(get_args(Offload))
    return len(_modes(degrees, maps)) * len(_zero_levels(degrees)) * below


_Keeps = Callable[[UniformStrategy], bool]


def _rules(situation: Situation) -> list[tuple[str, _Keeps]]:
    """Requirements: (name, whether a leaf meets it)."""
    rules: list[tuple[str, _Keeps]] = [
        (PINNED, lambda leaf: keeps_pins(leaf, situation.pins)),
        (BATCH, lambda leaf: situation.batch_size % leaf.degrees.batch_ranks == 0),
    ]
    if not situation.allow_planned:
        rules.append((PLANNED, lambda leaf: leaf.runs))
    if not situation.host_bytes_per_s:
        rules.append((NO_HOST_LINK, lambda leaf: leaf.offload == "none"))
    if not situation.has_states:
        rules.append((NO_STATES, lambda leaf: leaf.offload != "optimizer"))
    return rules


def _prunings(left: Sequence[UniformStrategy], situation: Situation) -> list[tuple[str, _Keeps]]:
    """Prunings: (name, whether a leaf is cut), in force where not switched off.

    A tp axis that leaves the node pays the slow link in every op; it is cut while a leaf inside a
    node, of no larger cp, is left, unless the axis may take the batch in most regions and weights
    in few. Offloading activations of a region that keeps none inside is the leaf without. No
    gradient waits for another microbatch, so none is whole for longer under ZeRO 1 than under 2.
    CONTEXT and EXPERTS are asked before leaves are made.
    """
    per_node = situation.devices_per_node
    inside = min((leaf.cp for leaf in left if leaf.tp <= per_node), default=math.inf)
    everything = frozenset(left)
    cuts: dict[str, _Keeps] = {
        NODE: lambda leaf: (
            inside <= leaf.cp and leaf.tp > per_node and not situation.has_feature_maps
        ),
        NOTHING_KEPT: lambda leaf: (
            (leaf.recompute, leaf.offload) == ("full", "activations")
            and replace(leaf, offload="none") in everything
        ),
        GRADIENTS: lambda leaf: leaf.zero == 1 and replace(leaf, zero=2) in everything,
    }
    return [(name, cut) for name, cut in cuts.items() if name not in situation.switched_off]


def pinned_values(leaf: UniformStrategy) -> dict[str, PinValue]:
    """What the pins of CompileOptions say about a leaf; it has no schedule, pipelines have."""
    return {
        "dp": leaf.dp,
        "ep": leaf.ep,
        "cp": leaf.cp,
        "tp": leaf.tp,
        "zero": leaf.zero,
        "sp": int(leaf.sequence_parallel),
        "recompute": leaf.recompute,
        "offload": leaf.offload,
        "pp": leaf.pp,
        "microbatches": leaf.microbatches,
        "schedule": "",
        "chunks": 1,
    }


def keeps_pins(leaf: UniformStrategy, pins: Mapping[str, PinValue]) -> bool:
    """Whether a leaf has every pinned value."""
    values = pinned_values(leaf)
    return all(values[name] == wanted for name, wanted in pins.items())


def _why_not(name: str, left: Sequence[UniformStrategy], situation: Situation) -> str:
    if name == PINNED:
        return _broken_pin(left, situation)
    if name == BATCH:
        found = sorted({(leaf.dp, leaf.ep) for leaf in left})
        choices = ", ".join(f"dp={dp}" + (f" x ep={ep}" if ep > 1 else "") for dp, ep in found)
        return (
            f"a batch of {situation.batch_size} does not divide over {choices}; "
            f"change the batch or pin another dp"
        )
    pins = ", ".join(f"{name}={value}" for name, value in situation.pins.items())
    if name == NO_HOST_LINK:
        return (
            f"pin {pins}: nothing is known about the link between device and host; give "
            "host_bytes_per_s of the devices in a cluster file"
        )
    if name == NO_STATES:
        return f"pin {pins}: this optimizer has no states to offload"
    return f"pin {pins}: can be planned, not run yet; say --allow planned to plan it"


def _broken_pin(everything: Sequence[UniformStrategy], situation: Situation) -> str:
    """The pin that no leaf can keep, alone or with the pins before it."""
    left = everything
    for name, wanted in situation.pins.items():
        remaining = [leaf for leaf in left if keeps_pins(leaf, {name: wanted})]
        if not remaining:
            offered = dict.fromkeys(pinned_values(leaf)[name] for leaf in left)
            return (
                f"pin {name}={wanted} cannot be kept on {situation.num_devices} devices"
                f"{' with the other pins' if len(left) < len(everything) else ''}; "
                f"{name} can be {', '.join(map(str, _sorted(offered)))}"
            )
        left = remaining
    raise AssertionError("every pin was kept")


def _sorted(values: Iterable[PinValue]) -> list[PinValue]:
    """Numbers by size, words in the order given."""
    found = list(values)
    return sorted(found, key=lambda v: v if isinstance(v, int) else 0)
