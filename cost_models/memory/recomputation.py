"""What a region that recomputes saves in its forward, and what its backward recomputes.

Full recomputation (Chen et al. 2016, arXiv:1604.06174) saves the slots; the forward is repeated as
far as the last step of which autograd keeps anything. Selective recomputation (Korthikanti et al.
2022, arXiv:2205.05198, section 5) also saves the results of some steps (LocalStep.is_saved), and
recomputes only what the backward then misses. In reverse order of the steps,

    wanted      operands that autograd keeps of any step; results that it keeps; operands of what is
                recomputed
    recomputed  a step that is not saved and has a wanted result, or keeps something of its own
    saved       wanted results of saved steps, wanted slots

so the results of saved steps are saved only where something wants them: the last product of a
layer, which is added to the residual and read by nothing else, is not.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from meshfold.cost_models.memory.op_memory import NEW_STORAGE, OpProbe


@dataclass(frozen=True, slots=True)
class LocalStep:
    """An op or a step of a conversion on local tensors."""

    operands: tuple[int, ...]
    """Tensors read, repeats included."""
    outputs: tuple[int, ...]
    probe: OpProbe


@dataclass(frozen=True)
class RecomputePlan:
    """What the forward saves and the backward recomputes."""

    saved: frozenset[int]
    """Tensors from the forward that the backward starts from."""
    steps: frozenset[int]
    """Steps that are recomputed."""
    released: tuple[tuple[int, ...], ...]
    """The tensors not needed any more after each recomputed step, and at the end."""
    waiting: frozenset[int]
    """Steps whose backward needs something recomputed."""


def keeps(probe: OpProbe) -> bool:
    """Whether autograd keeps anything of an op."""
    return bool(probe.saved_operands or probe.saved_outputs or probe.saved_bytes)


def plan_recompute(
    steps: Sequence[LocalStep], num_slots: int, kept: Collection[int] | None = None
) -> RecomputePlan:
    """Selective with the results of these steps kept, full where kept is None."""
    if kept is None:
        return _recompute_all(steps, num_slots)
    wanted: set[int] = set()
    recomputed = set()
    for k in reversed(range(len(steps))):
        step, probe = steps[k], steps[k].probe
        wanted.update(step.operands[j] for j in probe.saved_operands)
        wanted.update(step.outputs[j] for j in probe.saved_outputs)
        is_wanted = probe.saved_bytes > 0 or not wanted.isdisjoint(step.outputs)
        if is_wanted and k not in kept:
            recomputed.add(k)
            wanted.update(step.operands)
    saved = wanted.intersection(range(num_slots))
    saved.update(t for k in kept for t in steps[k].outputs if t in wanted)
    last_use: dict[int, int] = {}
    for k, step in enumerate(steps):
        tensors = step.operands if k in recomputed else _saved_operands(step)
        last_use.update(dict.fromkeys((*tensors, *step.outputs), k))
    saved_inside = {t for t in saved if t >= num_slots}
    return RecomputePlan(
        frozenset(saved),
        frozenset(recomputed),
        _released(steps, recomputed, saved_inside, last_use),
        _waiting(steps, num_slots, kept),
    )


def _waiting(steps: Sequence[LocalStep], num_slots: int, kept: Collection[int]) -> frozenset[int]:
    """Steps of which autograd keeps what is on no storage of a slot or of a kept result."""
    resident = set(range(num_slots))
    waiting = set()
    for k, step in enumerate(steps):
        probe = step.probe
        for t, output in zip(step.outputs, probe.outputs, strict=True):
            is_view = output.storage != NEW_STORAGE
            if k in kept or (is_view and step.operands[output.storage] in resident):
                resident.add(t)
        own = k not in kept and (probe.saved_bytes or probe.saved_outputs)
        if own or not resident.issuperset(_saved_operands(step)):
            waiting.add(k)
    return frozenset(waiting)


def _saved_operands(step: LocalStep) -> tuple[int, ...]:
    return tuple(step.operands[j] for j in step.probe.saved_operands)


def _recompute_all(steps: Sequence[LocalStep], num_slots: int) -> RecomputePlan:
    """Full recomputation. What later steps would read is alive until the second run stops."""
    last = max((k for k, step in enumerate(steps) if keeps(step.probe)), default=-1)
    stop = 0
    if last >= 0:
        # Operands are noted before an op runs: one that keeps nothing else is not recomputed.
        probe = steps[last].probe
        stop = last + 1 if probe.saved_outputs or probe.saved_bytes else last
    last_use: dict[int, int] = {}
    for k, step in enumerate(steps):
        last_use.update(
            dict.fromkeys((*step.operands, *step.outputs), k if k < stop else len(steps))
        )
    recomputed = set(range(stop))
    released = _released(steps, recomputed, set(), last_use)
    waiting = frozenset(k for k, step in enumerate(steps) if keeps(step.probe))
    return RecomputePlan(frozenset(range(num_slots)), frozenset(recomputed), released, waiting)


def _released(
    steps: Sequence[LocalStep], recomputed: set[int], saved: set[int], last_use: dict[int, int]
) -> tuple[tuple[int, ...], ...]:
    """Tensors that the second run makes, or finds, by their last use."""
    released: list[list[int]] = [[] for _ in range(len(steps) + 1)]
    for t in (*sorted(saved), *(t for k in sorted(recomputed) for t in steps[k].outputs)):
        released[last_use[t]].append(t)
    return tuple(map(tuple, released))
