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

from collections.abc import Sequence
from dataclasses import dataclass

from meshfold.cost_models.memory.op_memory import OpProbe


@dataclass(frozen=True, slots=True)
class LocalStep:
    """An op or a step of a conversion on local tensors."""

    operands: tuple[int, ...]
    """Tensors read, repeats included."""
    outputs: tuple[int, ...]
    probe: OpProbe
    is_saved: bool = False
    """Whether its results are saved for the backward where other steps are recomputed."""


@dataclass(frozen=True)
class RecomputePlan:
    """What the forward saves and the backward recomputes."""

    saved: frozenset[int]
    """Tensors from the forward that the backward starts from."""
    steps: frozenset[int]
    """Steps that are recomputed."""
    released: tuple[tuple[int, ...], ...]
    """The tensors not needed any more after each recomputed step, and at the end."""


def keeps(probe: OpProbe) -> bool:
    """Whether autograd keeps anything of an op."""
    return bool(probe.saved_operands or probe.saved_outputs or probe.saved_bytes)


def plan_recompute(steps: Sequence[LocalStep], num_slots: int) -> RecomputePlan:
    """Selective where a step is saved, full where none is."""
    if not any(step.is_saved for step in steps):
        return _recompute_all(steps, num_slots)
    wanted: set[int] = set()
    recomputed = set()
    for k in reversed(range(len(steps))):
        step, probe = steps[k], steps[k].probe
        wanted.update(step.operands[j] for j in probe.saved_operands)
        wanted.update(step.outputs[j] for j in probe.saved_outputs)
        is_wanted = probe.saved_bytes > 0 or not wanted.isdisjoint(step.outputs)
        if is_wanted and not step.is_saved:
            recomputed.add(k)
            wanted.update(step.operands)
    saved = wanted.intersection(range(num_slots))
    saved.update(t for step in steps if step.is_saved for t in step.outputs if t in wanted)
    last_use: dict[int, int] = {}
    for k, step in enumerate(steps):
        tensors = step.operands if k in recomputed else _saved_operands(step)
        last_use.update(dict.fromkeys((*tensors, *step.outputs), k))
    saved_inside = {t for t in saved if t >= num_slots}
    return RecomputePlan(
        frozenset(saved),
        frozenset(recomputed),
        _released(steps, recomputed, saved_inside, last_use),
    )


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
    return RecomputePlan(frozenset(range(num_slots)), frozenset(recomputed), released)


def _released(
    steps: Sequence[LocalStep], recomputed: set[int], saved: set[int], last_use: dict[int, int]
) -> tuple[tuple[int, ...], ...]:
    """Tensors that the second run makes, or finds, by their last use."""
    released: list[list[int]] = [[] for _ in range(len(steps) + 1)]
    for t in (*sorted(saved), *(t for k in sorted(recomputed) for t in steps[k].outputs)):
        released[last_use[t]].append(t)
    return tuple(map(tuple, released))
