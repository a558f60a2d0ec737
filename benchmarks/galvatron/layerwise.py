"""Plans Galvatron's layer-wise cases with meshfold's run search, under Galvatron's judge.

A plan is one table (batch, microbatches, pipeline degree P), one embedding
strategy, one strategy per layer. With C_i the microbatch time of stage i, R_i the same with exposed
gradient reduction, m microbatches, a = max(0, m + 1 - P), q = min(P - 1, m - 1), the judge is

    T = max(sum C + (m-1) C_last,  (q + a) C_0,  C_1 + .. + C_last + a C_0)
        + max(0, max_i R_i - C_0 - .. - C_i),

a maximum of linear forms of all C and R. The first line grows with every C, so

    bound    per (table, embedding, buffer): the hulls of all stages read at their memory
    order    all of these by bound; stop when the bound reaches the best plan
    solve    every stage for its least C, then, while the second line counts, one stage after the
             other for T itself with the other stages as they are (benchmarks/galvatron/forms.py)

The all-gather buffer depends on the largest degree in the plan: it is a case distinction, from no
tensor parallelism at all to each degree as the largest allowed one.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from galvatron.cases import Document, Found, LayerwisePlan, layer_type_numbers
from galvatron.forms import MaxOfForms, MeasuredLayers, solve_forms
from meshfold.passes.run.core import CoreResult
from meshfold.passes.run.hull import FloatArray, IntArray, lower_hull, sum_hulls

NODE_CAP = 20_000
RELATIVE_TIE = 1e-12
MAX_ROUNDS = 4

_NUM_PHASES = 3
"""Forms of the first line of T in the module docstring."""


@dataclass(frozen=True)
class Candidate:
    """A variant of a table with one embedding strategy, and a lower bound on its step time."""

    bound_per_sample_s: float
    variant: "Variant"
    embedding: int


def plan_layerwise(case: Document) -> Found | None:
    """The plan with the most samples/s over all tables of a case; None when nothing fits."""
    return best_candidate(candidates_of(case))


def candidates_of(case: Document) -> list[Candidate]:
    """Every choice of table, allowed degrees and embedding that may fit, by bound."""
    found = [
        Candidate(bound_s / variant.batch, variant, embedding)
        for number in range(len(case["cost_tables"]))
        for variant in variants_of(case, number)
        for embedding, bound_s in enumerate(variant.bounds_s().tolist())
        if math.isfinite(bound_s)
    ]
    return sorted(found, key=lambda candidate: candidate.bound_per_sample_s)


def best_candidate(candidates: Sequence[Candidate]) -> Found | None:
    """The best plan of the candidates, which come by increasing bound."""
    best: Found | None = None
    best_per_sample_s = least_per_sample_s = math.inf
    for candidate in candidates:
        if candidate.bound_per_sample_s >= best_per_sample_s * (1 - RELATIVE_TIE):
            break
        variant = candidate.variant
        limit_s = best_per_sample_s * variant.batch
        time_s, proven_s, plan = variant.solve(candidate.embedding, limit_s)
        least_per_sample_s = min(least_per_sample_s, proven_s / variant.batch)
        if plan is not None and time_s / variant.batch < best_per_sample_s:
            best_per_sample_s = time_s / variant.batch
            best = Found(plan, time_s, variant.batch, 0.0)
    if best is None:
        return None
    gap = max(0.0, best_per_sample_s / least_per_sample_s - 1) if least_per_sample_s > 0 else 0.0
    return replace(best, gap=gap if gap > RELATIVE_TIE else 0.0)


def variants_of(case: Document, number: int) -> Iterator["Variant"]:
    """A table without tensor parallelism, and with each degree as the largest allowed."""
    table = case["cost_tables"][number]
    yield Variant(case, number, table, 0, lambda strategy: bool(strategy["tp"] == 1))
    everything = [*table["layers"], *table["embedding"]]
    if all(strategy["tp"] == 1 for strategy in everything):
        return
    for degree in sorted({_degree(strategy) for strategy in everything}):
        buffer_mb = int(table["allgather_buffer_mb_by_max_tp"].get(str(degree), 0))
        yield Variant(case, number, table, buffer_mb, lambda s, most=degree: _degree(s) <= most)


def _degree(strategy: Document) -> int:
    return int(max(strategy["tp"], strategy["sp"]))


class Variant:
    """One cost table with the strategies that share one all-gather buffer."""

    def __init__(
        self,
        case: Document,
        number: int,
        table: Document,
        buffer_mb: int,
        allowed: Callable[[Document], bool],
    ) -> None:
        self.buffer_mb, self.allowed = buffer_mb, allowed
        self.number, self.batch = number, int(table["gbsz"])
        self.chunks, self.num_stages = int(table["chunks"]), int(table["pp"])
        self.division = tuple(map(int, table["pp_division"]))
        self.layers = [s for s in table["layers"] if allowed(s)]
        self.embeddings = _useful_embeddings([s for s in table["embedding"] if allowed(s)])
        self.free_mb = math.floor(case["cluster"]["usable_memory_mb"]) - buffer_mb
        self.types = layer_type_numbers(case)
        self.rows = _judge_rows(self.num_stages, self.chunks)
        self.stages = [self._layers(stage) for stage in range(self.num_stages)]
        self._least: dict[tuple[int, int], CoreResult] = {}

    def divided(self, case: Document, division: tuple[int, ...]) -> "Variant":
        """The same choice with other numbers of layers per stage."""
        table = case["cost_tables"][self.number] | {"pp_division": division}
        return Variant(case, self.number, table, self.buffer_mb, self.allowed)

    def _layers(self, stage: int) -> list[MeasuredLayers]:
        first = sum(self.division[:stage])
        return self.layers_of(stage, first, self.division[stage])

    def layers_of(self, stage: int, first: int, count: int) -> list[MeasuredLayers]:
        """Some layers on a stage, by type; measures: microbatch seconds without and with sync."""
        members = self.types[first : first + count]
        found = []
        for kind in sorted(set(members)) if self.layers else ():
            times = [
                [s[key][kind] for s in self.layers] for key in ("time_nosync_s", "time_sync_s")
            ]
            memory = [math.ceil(s["mem_mb"][kind][stage]) for s in self.layers]
            count = members.count(kind)
            found.append(MeasuredLayers(count, np.array(times), np.array(memory, np.int64)))
        return found

    def _budget_mb(self, stage: int, embedding: int) -> int:
        return self.free_mb - math.ceil(self.embeddings[embedding]["mem_mb"][stage])

    def bounds_s(self) -> FloatArray:
        """Lower bound on the step time for each embedding strategy."""
        if not self.layers or not self.embeddings:
            return np.zeros(0)
        stage_s = np.array([self.stage_s(i, layers) for i, layers in enumerate(self.stages)])
        extra_s = np.array([s["time_nosync_s"] for s in self.embeddings], float).T
        fits = np.isfinite(stage_s).all(axis=0)
        bounds_s = self.phases_s(np.where(fits, stage_s + extra_s, 0.0))
        if self.num_stages == 1:
            exposed = (self.chunks - 1.0, 1.0)
            exposed_s = self.stage_s(0, self.stages[0], exposed)
            bounds_s = np.maximum(bounds_s, exposed_s + (self.chunks - 1) * extra_s[0])
        return np.where(fits, bounds_s, np.inf)

    def phases_s(self, stage_s: FloatArray) -> FloatArray:
        """The first line of T for seconds per stage (rows), embedding included."""
        return np.asarray((self.rows[:_NUM_PHASES, : self.num_stages] @ stage_s).max(axis=0))

    def stage_s(
        self, stage: int, layers: Sequence[MeasuredLayers], weights: Sequence[float] = (1.0, 0.0)
    ) -> FloatArray:
        """Relaxed weighted measures of layers on a stage, for each embedding strategy."""
        budgets = [self._budget_mb(stage, e) for e in range(len(self.embeddings))]
        hulls = [lower_hull(np.array(weights) @ x.measures, x.memory_bytes) for x in layers]
        return sum_hulls(hulls, [x.count for x in layers]).time_at_s(budgets)

    def solve(
        self, embedding: int, incumbent_s: float
    ) -> tuple[float, float, LayerwisePlan | None]:
        """Time, proven lower bound and plan with this embedding strategy; no plan if all are worse
        than incumbent_s."""
        budgets = [self._budget_mb(stage, embedding) for stage in range(self.num_stages)]
        extra_s = self.embeddings[embedding]["time_nosync_s"]
        counts: list[tuple[IntArray, ...]] = []
        for stage in range(1, self.num_stages):
            least = self._least_time(stage, budgets[stage])
            assert least.plan is not None
            counts.append(least.plan.counts)
        counts.insert(0, tuple(np.zeros(len(self.layers), np.int64) for _ in self.stages[0]))
        first = self._solve_stage(counts, 0, budgets[0], extra_s, 2 * _NUM_PHASES, incumbent_s)
        proven_s = first.dual_s if first.capped or first.plan is None else first.plan.time_s
        if first.plan is None:
            return math.inf, proven_s if first.capped else incumbent_s, None
        counts[0] = first.plan.counts
        time_s = self._time_s(counts, extra_s)
        for _ in range(MAX_ROUNDS):
            if time_s <= proven_s * (1 + RELATIVE_TIE):
                break
            before_s = time_s
            for stage in range(self.num_stages):
                every = len(self.rows)
                best = self._solve_stage(counts, stage, budgets[stage], extra_s, every, math.inf)
                assert best.plan is not None
                counts[stage] = best.plan.counts
            time_s = self._time_s(counts, extra_s)
            if time_s >= before_s * (1 - RELATIVE_TIE):
                break
        return time_s, proven_s, self._plan(counts, embedding)

    def _least_time(self, stage: int, budget_mb: int) -> CoreResult:
        """The stage's least microbatch time, shared by embedding strategies of equal memory."""
        if (stage, budget_mb) not in self._least:
            objective = MaxOfForms(((1.0, 0.0),), (0.0,))
            self._least[stage, budget_mb] = solve_forms(
                self.stages[stage], objective, budget_mb, node_cap=NODE_CAP
            )
        return self._least[stage, budget_mb]

    def _solve_stage(
        self,
        counts: Sequence[tuple[IntArray, ...]],
        stage: int,
        budget_mb: int,
        extra_s: Sequence[float],
        num_rows: int,
        incumbent_s: float,
    ) -> CoreResult:
        """The counts of one stage that are best for the first forms of T, given other stages."""
        measures = self._measures(counts, extra_s)
        own = [stage, self.num_stages + stage]
        measures[own] = extra_s[stage], 0.0
        constants = self.rows @ measures
        forms: dict[tuple[float, ...], float] = {}
        for row in range(num_rows):
            coefficients = tuple(self.rows[row, own].tolist())
            forms[coefficients] = max(forms.get(coefficients, -math.inf), float(constants[row]))
        objective = MaxOfForms(tuple(forms), tuple(forms.values()))
        return solve_forms(
            self.stages[stage],
            objective,
            budget_mb,
            incumbent_s=incumbent_s,
            node_cap=NODE_CAP,
        )

    def _measures(
        self, counts: Sequence[tuple[IntArray, ...]], extra_s: Sequence[float]
    ) -> FloatArray:
        """C of all stages, then R of all stages."""
        sums = np.array(
            [
                sum(x.measures @ column for x, column in zip(layers, columns, strict=True))
                for layers, columns in zip(self.stages, counts, strict=True)
            ]
        )
        return np.concatenate((sums[:, 0] + np.asarray(extra_s), sums[:, 1]))

    def _time_s(self, counts: Sequence[tuple[IntArray, ...]], extra_s: Sequence[float]) -> float:
        return float((self.rows @ self._measures(counts, extra_s)).max())

    def _plan(self, counts: Sequence[tuple[IntArray, ...]], embedding: int) -> LayerwisePlan:
        names = tuple(
            strategy["name"]
            for columns in counts
            for column in columns
            for strategy, count in zip(self.layers, column.tolist(), strict=True)
            for _ in range(count)
        )
        return LayerwisePlan(self.number, names, self.embeddings[embedding]["name"], self.division)


def _useful_embeddings(embeddings: Sequence[Document]) -> list[Document]:
    """Without those that an earlier or better one matches or beats in all times and memory."""
    useful: list[Document] = []
    costs: list[FloatArray] = []
    for strategy in sorted(embeddings, key=lambda s: sum(s["time_nosync_s"])):
        cost = np.concatenate((strategy["time_nosync_s"], np.ceil(strategy["mem_mb"])))
        if not any((other <= cost).all() for other in costs):
            useful.append(strategy)
            costs.append(cost)
    return useful


def _judge_rows(stages: int, chunks: int) -> FloatArray:
    """T as a maximum of rows . (C, R): the three phases, then each with the excess of stage 0, then
    each with the excess of every later stage."""
    phases = np.zeros((_NUM_PHASES, 2 * stages))
    after = max(0, chunks + 1 - stages)
    phases[0, :stages] = 1.0
    phases[0, stages - 1] += chunks - 1
    phases[1, 0] = min(stages - 1, chunks - 1) + after
    phases[2, 1:stages] = 1.0
    phases[2, 0] = after
    rows = [phases]
    for stage in range(stages):
        excess = np.zeros(2 * stages)
        excess[: stage + 1] = -1.0
        excess[stages + stage] = 1.0
        rows.append(phases + excess)
    return np.concatenate(rows)
