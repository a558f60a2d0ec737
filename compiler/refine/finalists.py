"""The finalists of a search on their emitted programs, in the modes that they may run in.

    finalists    the best plan of the search, and others that may win once they are emitted: the
                 best in one pass beside a pipeline, rivals on other meshes (passes.one_pass.rivals)
    each of them refined (meshfold.refine.pipeline) in mode eager and in mode scheduled, unless its
                 kernels and collectives take too long in any order, or hardly any are inside of
                 regions, which is all that the modes do otherwise
    the fastest  what comes first stays unless another is LEAST_GAIN faster, or it does not fit as
                 emitted; eager comes first

Stages of a pipeline are simulated alike in both modes, so they run in mode eager.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from meshfold.codegen.emit.memo import EmissionMemo
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.errors import OptionError
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.options import CompileOptions, Mode
from meshfold.ir.plan import Plan
from meshfold.passes.one_pass.rivals import LEAST_GAIN, least_step_s
from meshfold.refine.pipeline import bucketed, refined, reordered
from meshfold.units import seconds_text


@dataclass(frozen=True)
class Winner:
    """finalist: as the search wrote it down; plan: with every choice made, and its notes."""

    finalist: Plan
    plan: Plan


def fastest(finalists: Sequence[Plan], folded: FoldedGraph, options: CompileOptions) -> Winner:
    """The finalist, of which there is one, whose program is fastest, in its fastest mode.
    folded: the graph that they are plans of.

    Raises OptionError where no finalist can keep a pin.
    """
    found: list[_Refined] = []
    errors: list[OptionError] = []
    for finalist in finalists:
        try:
            one = _Refined.of(finalist, folded, options, found)
        except OptionError as error:
            errors.append(error)
            continue
        if one is not None and (not found or _is_faster(one.best, found[0].best)):
            found.insert(0, one)
    if not found:
        raise errors[0]
    best = found[0]
    notes = (*best.best.notes, *best.mode_notes(options), *_overtaken(best, found[1:]))
    return Winner(best.finalist, replace(best.best, notes=notes))


@dataclass(frozen=True)
class _Refined:
    """A finalist with every choice made. other: in the mode in which it is not faster."""

    finalist: Plan
    best: Plan
    other: Plan | None = None

    @classmethod
    def of(
        cls,
        finalist: Plan,
        folded: FoldedGraph,
        options: CompileOptions,
        known: Sequence["_Refined"],
    ) -> "_Refined | None":
        """None where it cannot be faster than the first of what is known."""
        if known and not known[0].may_lose_to(finalist):
            return None
        memo = None if finalist.events is None else EmissionMemo(folded, finalist)

        def in_mode(mode: Mode, first: Plan) -> Plan:
            """As far as it may be faster than the first: other sizes of buckets gain little."""
            plan = reordered(replace(finalist, mode=mode), folded, options, memo)
            if first.events is None:  # a pipeline, which has no such buckets
                return bucketed(plan, options)
            found = bucketed(plan, options, like=first)
            return bucketed(plan, options) if _is_faster(found, first, gain=0.0) else found

        is_open = len(options.modes) > 1 and _may_differ(finalist)
        if known and is_open:
            # What wins at all wins in mode scheduled; the simpler program is held against it then.
            scheduled = in_mode("scheduled", known[0].best)
            if not _is_faster(scheduled, known[0].best):
                return None
            eager = in_mode("eager", scheduled)
        else:
            eager = refined(finalist, folded, options, memo)
            if not (is_open and cls(finalist, eager).may_lose_to(finalist)):
                return cls(finalist, eager)
            scheduled = in_mode("scheduled", eager)
        if _is_faster(scheduled, eager):
            return cls(finalist, scheduled, eager)
        return cls(finalist, eager, scheduled)

    def may_lose_to(self, plan: Plan) -> bool:
        """Whether `plan`, as the search wrote it, may be faster once it is emitted, in any mode.
        Its kernels and collectives that stay take least_step_s in any order, and all that
        modes hide otherwise are these collectives; buckets gain what they gain here, which a
        pipeline does not tell: its gradients are reduced once, whatever their buckets."""
        if plan.simulated is None or not self.best.memory.fits:
            return True
        inside_s, slowdown = _inside_s(plan), plan.cluster.overlap_slowdown
        wanted_s = (1 - LEAST_GAIN) * self.best.step_s
        eager = next((p for p in (self.other, self.best) if p and p.mode == "eager"), self.best)
        refined_less = max(1.0, self.finalist.step_s / eager.step_s)
        if least_step_s(plan.simulated.compute_s, by_link_s(plan), slowdown) >= wanted_s:
            return False
        says_buckets = self.finalist.events is not None
        return not says_buckets or plan.step_s - sum(inside_s.values()) < refined_less * wanted_s

    def mode_notes(self, options: CompileOptions) -> tuple[str, ...]:
        """What led to the mode, where there was something to choose."""
        if len(options.modes) == 1 or not _may_differ(self.finalist):
            return ()
        found = f"mode {self.best.mode}: {seconds_text(self.best.step_s)} as simulated"
        if self.other is not None:
            return (f"{found}, in mode {self.other.mode} {seconds_text(self.other.step_s)}",)
        return (f"{found}, which no other order makes 0.5 % faster",)


def _overtaken(best: _Refined, others: Sequence[_Refined]) -> tuple[str, ...]:
    """What the search had ahead of a rival."""
    if not others:
        return ()
    first = others[-1].best
    return (
        f"{first.strategy.label} was ahead as the search simulates; emitted it takes "
        f"{seconds_text(first.step_s)}, in mode {first.mode}",
    )


def _may_differ(plan: Plan) -> bool:
    """Whether mode scheduled can run it and may gain: where a share of the step is collectives
    inside of regions, and saved activations stay on the device."""
    on_host = any(region.strategy.offload == "activations" for region in plan.regions)
    return not on_host and sum(_inside_s(plan).values()) > LEAST_GAIN * plan.step_s


def _inside_s(plan: Plan) -> Mapping[str, float]:
    """Seconds of collectives inside of regions, by link, as a plan of the search has them."""
    found: dict[str, float] = {}
    counts = Counter(plan.events.instances) if plan.events else {}
    for number, count in counts.items():
        assert plan.events is not None
        region = plan.events.regions[number]
        for event in (*region.forward, *region.backward):
            if event.kind == "inline" and event.collective is not None:
                link, seconds = event.collective.link, event.collective.seconds
                found[link] = found.get(link, 0.0) + count * seconds
    return found


def by_link_s(plan: Plan) -> Mapping[str, float]:
    """Seconds of each link: collectives inside of regions, and what gathers of parameters and
    reduce-scatters of gradients take however they are bucketed: all their bytes at once."""
    found = dict(_inside_s(plan))
    if plan.events is None:
        return found
    num_bytes: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for number, count in Counter(plan.events.instances).items():
        for group in plan.events.regions[number].groups:
            for of in (group.gather, group.reduce):
                if of is not None and of.kind != "all_reduce" and not of.steps:
                    num_bytes[of.kind, of.axes] += count * of.num_bytes
    costs = CostModel(plan.cluster, plan.mesh).storage
    for (kind, names), size in num_bytes.items():
        axes = [costs.mesh.index(name) for name in names]
        link = costs.group_link(axes).name
        found[link] = found.get(link, 0.0) + costs.collective_s(kind, size, axes)
    return found


def _is_faster(found: Plan, best: Plan, gain: float = LEAST_GAIN) -> bool:
    """Whether it is worth taking: it fits, and is faster by the share `gain`, or the best one does
    not fit."""
    gains = found.step_s < (1 - gain) * best.step_s
    return found.memory.fits and (gains or not best.memory.fits)
