"""What one stage has of a microbatch outside of the instance that runs, moment by moment.

Moments are those of step_memory.py, for the instances of the stage alone. Between F and B the stage
keeps what arrived, what it sent and what it saves; in B there is also the gradient that arrived.
Gradients of parameters, by how they are reduced (meshfold.zero.microbatch_state):

                                        first B   B between       last B, of several
    not, straight to .grad              grow      all             all
    with every microbatch               grow      all, and one    all, and one
    once, added up unsharded until then grow      all             all, replaced by what comes out

What is added straight to older gradients is gone at once (live_ranges.py), what is reduced with
every microbatch when the next instance's backward is over ("one"; its results count as buffers,
cost_models/simulation/gradient_buffers.py), but for parameters that several instances read: these
grow as in the first.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

from meshfold.cost_models.memory.parameter_uses import ParameterUse
from meshfold.cost_models.memory.put_off_bytes import LeftToW, PutOffBytes
from meshfold.cost_models.memory.step_memory import InstanceMemory, InstanceOutput, Timeline


@dataclass(frozen=True)
class StageInstance:
    """memory: with sources by number in the stage, those from other stages left out. outside: slots
    that read what arrived. put_off: what it leaves for W. is_once: whether gathered
    parameters have their gradients reduced once per step."""

    memory: InstanceMemory
    outside: tuple[int, ...] = ()
    put_off: PutOffBytes = PutOffBytes()
    is_once: bool = False


@dataclass(frozen=True)
class ParameterGradients:
    """Bytes at every moment of the first backward, of those between and of the last; summed:
    between two microbatches; final: when all are reduced."""

    first: tuple[int, ...]
    later: tuple[int, ...]
    last: tuple[int, ...]
    summed: int
    final: int
    each: int
    """Of summed, what is reduced with every microbatch."""
    beside: int
    """At most, of a later microbatch, beside these."""
    sums: int
    """Of summed, what is added up in buffers."""
    late: int
    """What is scattered from these with the last microbatch."""


@dataclass(frozen=True)
class StageResidents:
    """Bytes of one rank. Of n instances there are 2 n moments: all forwards, then all backwards."""

    activations: tuple[int, ...]
    """Of this microbatch, with gradients of values."""
    gradients: ParameterGradients
    kept: int
    """From F to B."""
    put_off: tuple[LeftToW, ...]
    """Of each instance, in the order of W."""
    saved: tuple[int, ...]
    """Of what is inside each instance when its backward begins."""

    @property
    def put_off_bytes(self) -> int:
        """From B to W."""
        return sum(instance.put_off.kept for instance in self.put_off)


def stage_residents(
    instances: Sequence[StageInstance],
    leaves: Sequence[InstanceOutput],
    *,
    arrived_bytes: int = 0,
    received_bytes: int = 0,
    is_only: bool = False,
    splits: bool = False,
) -> StageResidents:
    """leaves: values that go to the next stage, or the outputs of the model. arrived_bytes: that
    come from the stage before; received_bytes: of gradients from the stage behind. is_only: whether
    there is one microbatch, whose gradients live in their instance until its end. splits: whether B
    leaves all gradients of parameters to W."""
    instances = _named_here(instances)
    memories = [instance.memory for instance in instances]
    timeline = Timeline(memories, leaves, starts=())
    count, last = len(instances), timeline.last
    timeline.activations.add(0, last, arrived_bytes)
    # Held to the end by who calls the backward; the instance that takes it counts it once more.
    timeline.value_gradients.add(count, last, received_bytes)
    _add_sent(timeline, instances)
    for i, instance in enumerate(instances):
        timeline.activations.add(timeline.backward(i) + 1, last, instance.put_off.kept)
    activations = timeline.activations.totals()
    values = timeline.value_gradients.totals()
    of = _parameter_gradients(instances, is_only=is_only, splits=splits)
    return StageResidents(
        activations=tuple(a + b for a, b in zip(activations, values, strict=True)),
        gradients=of,
        kept=activations[count] + memories[-1].memory.saved_bytes,
        put_off=tuple(map(_left_to_w, reversed(instances))),
        saved=tuple(m.memory.saved_bytes for m in memories),
    )


def _left_to_w(instance: StageInstance) -> LeftToW:
    uses = instance.memory.parameters
    direct = sum(u.gradient_bytes for u in uses if _is_direct(u, instance.is_once))
    return LeftToW(instance.put_off, direct, all(u.how == "direct" for u in uses))


def _parameter_gradients(
    instances: Sequence[StageInstance], *, is_only: bool, splits: bool
) -> ParameterGradients:
    direct = _gradients(instances, _is_direct)
    each, stays = _gradients(instances, _is_each), _gradients(instances, _is_shared)
    lone = [0, *(a - b for a, b in zip(each.bytes, stays.bytes, strict=True))]
    once = _gradients(instances, is_summed)
    sums = _gradients(instances, is_summed, is_unsharded=True)
    constant = direct.final + each.final
    summed, final = constant + sums.final, constant + once.final
    late = _gradients(instances, _is_late).final
    beside = stays.final + max(map(sum, pairwise((0, *map(_passing_bytes, instances), 0))))
    ends = summed, final, each.final, beside, sums.final, late
    moments = range(2 * len(instances))
    if splits:
        nothing = (0,) * len(moments)
        return ParameterGradients(nothing, nothing, nothing, *ends)
    grown = [direct.bytes[t] + each.bytes[t] for t in moments]
    if is_only:
        only = tuple(grown[t] + once.bytes[t] for t in moments)
        return ParameterGradients(only, only, only, *ends)
    waiting = [sums.final - sums.bytes[t] + once.bytes[t] for t in moments]
    return ParameterGradients(
        # Behind the next instance these are sums.
        tuple(direct.bytes[t] + stays.bytes[t] + lone[t] + sums.bytes[t] for t in moments),
        tuple(summed + stays.bytes[t] for t in moments),
        tuple(constant + stays.bytes[t] + waiting[t] for t in moments),
        *ends,
    )


def _add_sent(timeline: Timeline, instances: Sequence[StageInstance]) -> None:
    """Gradients of what arrived, from the backward of the reader to the end of all."""
    for i, instance in enumerate(instances):
        memory = instance.memory.memory
        size = sum(memory.slot_gradient_bytes[k] for k in instance.outside)
        timeline.value_gradients.add(timeline.backward(i) + 1, timeline.last, size)


@dataclass(frozen=True)
class _Gradients:
    """Of some parameters: bytes at every moment, and at the end."""

    bytes: list[int]
    final: int


def _is_direct(use: ParameterUse, is_once: bool) -> bool:
    return use.how == "direct" and not use.name


def is_summed(use: ParameterUse, is_once: bool) -> bool:
    """Whether its gradient is added up in a buffer and reduced, or cast, once per step. is_once:
    whether those of gathered parameters are."""
    return use.how in ("reduced", "cast") or (use.how == "gathered" and is_once)


def _is_late(use: ParameterUse, is_once: bool) -> bool:
    return use.how == "gathered" and is_once


def _is_each(use: ParameterUse, is_once: bool) -> bool:
    """So is what several instances read: the sum of this microbatch waits for the last of them."""
    return not (_is_direct(use, is_once) or is_summed(use, is_once))


def _is_shared(use: ParameterUse, is_once: bool) -> bool:
    return bool(use.name) and _is_each(use, is_once)


def _passing_bytes(instance: StageInstance) -> int:
    """Of gradients that are reduced with every microbatch, and leave behind the next instance."""
    uses, once = instance.memory.parameters, instance.is_once
    return sum(u.resident_bytes for u in uses if _is_each(u, once) and not u.name)


def _named_here(instances: Sequence[StageInstance]) -> list[StageInstance]:
    """With names for those parameters alone that several slots of the stage read."""
    uses = chain.from_iterable(instance.memory.parameters for instance in instances)
    counts = Counter(use.name for use in uses)
    found = []
    for instance in instances:
        memory = instance.memory
        if any(u.name and counts[u.name] == 1 for u in memory.parameters):
            alone = (u if counts[u.name] > 1 else replace(u, name="") for u in memory.parameters)
            memory = replace(memory, parameters=tuple(alone))
        found.append(replace(instance, memory=memory))
    return found


def _gradients(
    instances: Sequence[StageInstance],
    wanted: Callable[[ParameterUse, bool], bool],
    *,
    is_unsharded: bool = False,
) -> _Gradients:
    """Of the uses that are wanted. is_unsharded: as they are before their reduction."""
    known: dict[tuple[int, bool], tuple[ParameterUse, ...]] = {}
    of = []
    for instance in instances:
        key = id(instance.memory.parameters), instance.is_once
        if key not in known:
            uses = (u for u in instance.memory.parameters if wanted(u, instance.is_once))
            known[key] = tuple(map(_unsharded, uses) if is_unsharded else uses)
        of.append(replace(instance.memory, parameters=known[key]))
    if not any(known.values()):
        return _Gradients([0] * (2 * len(of)), 0)
    timeline = Timeline(of, (), starts=())
    return _Gradients(timeline.gradients.totals(), timeline.final_gradients)


def _unsharded(use: ParameterUse) -> ParameterUse:
    """Each use of a parameter has sums of its own until the end."""
    return replace(use, stored_bytes=use.flat_bytes, gradient_bytes=use.flat_bytes, name="")
