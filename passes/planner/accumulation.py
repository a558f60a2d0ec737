"""Named baselines that do not fit in one pass, with what people give them to fit.

microbatches   the fewest over which gradients are accumulated that make it fit
stages         Megatron's where that is not enough (Narayanan et al., SC 2021): tp inside a
               node, as few stages as fit, dp with the rest; microbatches of 1, 2 or 4 samples,
               the fastest that fits; everything recomputed where nothing fits without
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from meshfold.errors import OptionError
from meshfold.ir.plan import PricedStrategy
from meshfold.ir.strategy import UniformStrategy
from meshfold.passes.one_pass.pruning import divisors
from meshfold.passes.pipeline.problem import PipelineProblems
from meshfold.passes.planner.assembly import PlanRequest
from meshfold.passes.planner.baselines import (
    MEGATRON,
    UniformPipeline,
    named_baselines,
    uniform_pipeline,
)

MEGATRON_STAGES = "Megatron tp+sp in a node, pp, dp outside"
SAMPLES = (1, 2, 4)
"""Of a microbatch of Megatron's pipelines."""


def fitting_rows(
    request: PlanRequest,
    rows: Iterable[PricedStrategy] = (),
    problems: PipelineProblems | None = None,
) -> tuple[PricedStrategy, ...]:
    """`rows`, those of named_baselines that do not fit in one pass with the microbatches and stages
    that they need; without rows, all named ones in that way. What does not fit in any case stays,
    if it is a row."""
    known = {row.name: row for row in rows}
    named = named_baselines(request.cluster)
    tight = [name for name in named if name not in known or not known[name].fits]
    accumulation = _Accumulation.of(request, problems) if tight else None
    if accumulation is None:
        return tuple(known.values())
    found = {name: accumulation.fitting(name, named[name]) for name in tight}
    given = {name: known.get(name) for name in dict.fromkeys((*named, *known))}
    both = [found.get(name) or row for name, row in given.items()]
    return tuple(row for row in both if row is not None)


@dataclass(frozen=True)
class _Accumulation:
    """Named strategies with the microbatches and stages that they need."""

    problems: PipelineProblems

    @classmethod
    def of(cls, request: PlanRequest, problems: PipelineProblems | None) -> "_Accumulation | None":
        """None where the batch cannot be split."""
        if problems is None:
            of_model = request.folded, request.cluster, request.options
            try:
                problems = request.shared.problems(*of_model, request.batch_size, request.probe)
            except OptionError:
                return None
        if problems.microbatches.refusal:
            return None
        return cls(problems)

    def fitting(self, name: str, strategy: UniformStrategy) -> PricedStrategy | None:
        """The row of a named strategy; None where no form of it fits, or the batch has too few
        samples."""
        found = self._fewest(strategy)
        if found is None and name == MEGATRON:
            name = MEGATRON_STAGES
            found = self._staged(strategy) or self._staged(replace(strategy, recompute="full"))
        if found is None:
            return None
        return PricedStrategy(name, found.strategy, found.step_s, found.peak_bytes, True)

    def _fewest(self, strategy: UniformStrategy) -> UniformPipeline | None:
        """With the fewest microbatches that fit. More of them keep less."""
        samples, rest = divmod(self.problems.batch_size, strategy.dp)
        if rest:
            return None
        counts = divisors(samples)
        found = self._priced(strategy, counts[-1])
        if found is None:
            return None
        low, high = 0, len(counts) - 1
        while low < high:
            middle = (low + high) // 2
            fewer = self._priced(strategy, counts[middle])
            if fewer is None:
                low = middle + 1
            else:
                found, high = fewer, middle
        return found

    def _staged(self, strategy: UniformStrategy) -> UniformPipeline | None:
        """With the fewest stages that fit, and the fastest of microbatches of 1, 2 or 4 samples."""
        for pp in divisors(strategy.dp)[1:]:
            staged = replace(strategy, pp=pp, dp=strategy.dp // pp)
            samples, rest = divmod(self.problems.batch_size, staged.dp)
            if rest or pp > len(self.problems.folded.instances):
                continue
            counts = dict.fromkeys(samples // k for k in SAMPLES if samples % k == 0)
            found = [x for m in counts if (x := self._priced(staged, m)) is not None]
            if found:
                return min(found, key=lambda x: (x.step_s, x.strategy.label))
        return None

    def _priced(self, strategy: UniformStrategy, microbatches: int) -> UniformPipeline | None:
        """None where it does not fit."""
        strategy = replace(strategy, microbatches=microbatches)
        return uniform_pipeline(self.problems, strategy)
