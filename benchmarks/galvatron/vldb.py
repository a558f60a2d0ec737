"""Plans the VLDB 2022 artifact's cases with meshfold's run search, under the artifact's judge.

Every stage is a chain of layers with a conversion cost between neighbours. For each batch and
pipeline degree, the relaxation without conversions bounds the step time from below; `solve_runs`
plans the stages of one after the other, by increasing bound on seconds per sample, until the bound
reaches the best plan.
"""

import math

import numpy as np

from galvatron.cases import (
    Document,
    Found,
    VldbPlan,
    layer_type_numbers,
    vldb_division,
    vldb_other_mb,
    vldb_strategies,
)
from meshfold.passes.run.hull import lp_values
from meshfold.passes.run.problem import LayerType, Run, RunPlan, RunProblem
from meshfold.passes.run.search import solve_runs

RELATIVE_TIE = 1e-12


def plan_vldb(case: Document, budget_mb: int) -> Found | None:
    """The plan with the most samples/s over all batches and pipeline degrees."""
    chains = [
        _VldbChain(case, batch, pp)
        for batch in case["tables"]
        for pp in sorted({strategy["pp"] for strategy in case["strategies"]})
    ]
    bounds = [(chain.bound_s(budget_mb) / int(chain.batch), k) for k, chain in enumerate(chains)]
    best: Found | None = None
    best_per_sample_s, capped_s = math.inf, math.inf
    for bound_per_sample_s, number in sorted(bounds):
        if not bound_per_sample_s < best_per_sample_s * (1 - RELATIVE_TIE):
            break
        chain = chains[number]
        plans = chain.solve(budget_mb)
        time_s = chain.repeats * sum(plan.time_s for plan in plans)
        if any(plan.capped for plan in plans):
            capped_s = min(capped_s, bound_per_sample_s)
        if time_s / int(chain.batch) < best_per_sample_s:
            best_per_sample_s = time_s / int(chain.batch)
            stages = tuple(
                tuple(block.name for block in plan.blocks for _ in range(block.count))
                for plan in plans
            )
            found = VldbPlan(chain.batch, chain.pp, stages)
            best = Found(found, time_s, int(chain.batch), 0.0)
    if best is None or capped_s >= best_per_sample_s:
        return best
    return Found(best.plan, best.time_s, best.batch, best_per_sample_s / capped_s - 1)


class _VldbChain:
    """The stages of one batch and pipeline degree as chains of runs, memory in MB."""

    def __init__(self, case: Document, batch: str, pp: int) -> None:
        table, members = case["tables"][batch], vldb_strategies(case, pp)
        self.batch, self.pp = batch, pp
        names = tuple(case["strategies"][index]["name"] for index in members)
        layer_types = [
            LayerType(
                f"type{kind}",
                names,
                np.array(times, float)[members],
                np.ceil(np.array(memory, float)[members]).astype(np.int64),
                np.arange(len(members)),
            )
            for kind, (times, memory) in enumerate(
                zip(table["time_s"], table["mem_mb"], strict=True)
            )
        ]
        self.conversion_s = np.array(table["inter_layer_s_by_pp"][str(pp)], float)
        self.other_mb = vldb_other_mb(case, batch, pp)
        is_uniform = len(layer_types) == 1
        self.repeats = pp if is_uniform else 1
        division = vldb_division(case, batch, pp)[: 1 if is_uniform else pp]
        kinds = layer_type_numbers(case)
        self.stages: list[tuple[Run, ...]] = []
        first = 0
        for count in division:
            members_of_stage = kinds[first : first + count]
            first += count
            self.stages.append(
                tuple(
                    Run(layer_types[kind], members_of_stage.count(kind))
                    for kind in sorted(set(members_of_stage))
                )
            )

    def _fixed_mb(self, stage: int) -> int:
        return self.other_mb if stage == 0 else 0

    def bound_s(self, budget_mb: int) -> float:
        """Least step time with free conversions and fractional counts; infinite: nothing fits."""
        bounds_s = [
            lp_values(
                [(r.layer_type.time_s, r.layer_type.memory_bytes, r.count) for r in runs],
                budget_mb - self._fixed_mb(stage),
            )
            for stage, runs in enumerate(self.stages)
        ]
        return self.repeats * float(sum(bounds_s))

    def solve(self, budget_mb: int) -> list[RunPlan]:
        """The best plan of every stage; all fit, since the bound is finite."""
        plans = []
        for stage, runs in enumerate(self.stages):
            fixed_mb = self._fixed_mb(stage)
            plan = solve_runs(RunProblem(runs, budget_mb, fixed_mb, self.conversion_s))
            assert isinstance(plan, RunPlan)
            plans.append(plan)
        return plans
