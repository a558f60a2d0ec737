"""What a region that recomputes holds after its forward, and what runs again in its backward.

Full recomputation (Chen et al. 2016, arXiv:1604.06174) holds the slots; the forward runs again as
far as the last step of which autograd keeps anything. Selective recomputation (Korthikanti et al.
2022, arXiv:2205.05198, section 5) holds what some steps made (LocalStep.stays) beside them, and
rebuilds nothing else than what the backward then misses. In reverse order of the steps,

    wanted   operands that autograd keeps of any step; results that it keeps; operands of what runs
             again
    again    a step that does not stay and has a wanted result, or keeps something of its own
    held     wanted results of steps that stay, wanted slots

so of steps that stay only what somebody wants is held: the last product of a layer, which is added
to the residual and read by nobody, is not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from meshfold.cost_models.memory.op_memory import OpProbe


@dataclass(frozen=True, slots=True)
class LocalStep:
    """An op or a step of a conversion: local tensors read, repeats kept, and made. stays: what it
    makes is held for the backward where other steps run again."""

    operands: tuple[int, ...]
    outputs: tuple[int, ...]
    probe: OpProbe
    stays: bool = False


@dataclass(frozen=True)
class Rebuild:
    """held: tensors from the forward that the backward starts from; again: steps that run a second
    time; released: per step of the second run, and at its end, the tensors not needed any more."""

    held: frozenset[int]
    again: frozenset[int]
    released: tuple[tuple[int, ...], ...]


def keeps(probe: OpProbe) -> bool:
    """Whether autograd keeps anything of an op."""
    return bool(probe.saved_operands or probe.saved_outputs or probe.saved_bytes)


def plan_rebuild(steps: Sequence[LocalStep], num_slots: int) -> Rebuild:
    """What to hold and to run again; selective where a step stays, full where none does."""
    if not any(step.stays for step in steps):
        return _rebuild_all(steps, num_slots)
    wanted: set[int] = set()
    again = set()
    for k in reversed(range(len(steps))):
        step, probe = steps[k], steps[k].probe
        wanted.update(step.operands[j] for j in probe.saved_operands)
        wanted.update(step.outputs[j] for j in probe.saved_outputs)
        is_wanted = probe.saved_bytes > 0 or not wanted.isdisjoint(step.outputs)
        if is_wanted and not step.stays:
            again.add(k)
            wanted.update(step.operands)
    held = wanted.intersection(range(num_slots))
    held.update(t for step in steps if step.stays for t in step.outputs if t in wanted)
    last_use: dict[int, int] = {}
    for k, step in enumerate(steps):
        tensors = step.operands if k in again else _saved_operands(step)
        last_use.update(dict.fromkeys((*tensors, *step.outputs), k))
    held_inside = {t for t in held if t >= num_slots}
    return Rebuild(
        frozenset(held), frozenset(again), _released(steps, again, held_inside, last_use)
    )


def _saved_operands(step: LocalStep) -> tuple[int, ...]:
    return tuple(step.operands[j] for j in step.probe.saved_operands)


def _rebuild_all(steps: Sequence[LocalStep], num_slots: int) -> Rebuild:
    """Full recomputation. What later steps would read is there until the second run stops."""
    last = max((k for k, step in enumerate(steps) if keeps(step.probe)), default=-1)
    stop = 0
    if last >= 0:
        # Operands are noted before an op runs: one that keeps nothing else does not run again.
        probe = steps[last].probe
        stop = last + 1 if probe.saved_outputs or probe.saved_bytes else last
    last_use: dict[int, int] = {}
    for k, step in enumerate(steps):
        last_use.update(
            dict.fromkeys((*step.operands, *step.outputs), k if k < stop else len(steps))
        )
    again = set(range(stop))
    released = _released(steps, again, set(), last_use)
    return Rebuild(frozenset(range(num_slots)), frozenset(again), released)


def _released(
    steps: Sequence[LocalStep], again: set[int], held: set[int], last_use: dict[int, int]
) -> tuple[tuple[int, ...], ...]:
    """Tensors that the second run makes, or finds, by their last use."""
    released: list[list[int]] = [[] for _ in range(len(steps) + 1)]
    for t in (*sorted(held), *(t for k in sorted(again) for t in steps[k].outputs)):
        released[last_use[t]].append(t)
    return tuple(map(tuple, released))
