"""Plans Galvatron's published cost tables with meshfold and compares with Galvatron's own plans.

    python benchmarks/galvatron_tables.py DIR

DIR holds case files (*.json; an index.json is not needed). Every case is planned under Galvatron's
own judge formula, the plan is judged again by an independent implementation, and one row says: our
step time, that of the engine's plan on the same tables, their ratio (engine / ours per sample of
the batch: at least 1 means never worse), CPU seconds of our planning and of the engine's search,
and the proven gap of our plan. CPU seconds leave out reading the file; the engine's are those its
file states. The last line is the worst ratio. Exit code 0; 1 when a ratio is below 1 by more than
rounding (1e-9); 2 for a bad directory or file.

Stages are divided as in the tables, evenly, and unevenly where both the judge's time and the time
at the pace of the slowest stage gain (gap "-": better than every even plan, not proven best);
--even leaves that out.

Caveat: the judge of the layer-wise cases charges nothing for a change of layout between two layers,
so a plan that mixes tensor-parallel degrees is slightly too cheap there (about 0.2 % of a step for
each change of degree in the 7B models), ours and the engine's alike.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from galvatron.cases import (
    CaseError,
    Document,
    Found,
    Judgement,
    LayerwisePlan,
    VldbPlan,
    engine_layerwise,
    engine_vldb,
    is_vldb,
    judge_layerwise,
    judge_vldb,
    read_cases,
)
from galvatron.divisions import plan_uneven
from galvatron.layerwise import plan_layerwise
from galvatron.vldb import plan_vldb

RELATIVE_ROUNDING = 1e-9
"""Of ratios and of sums of the same numbers."""

TABLE_ROUNDING = 1e-6
"""Of a stated time against the sum of the tables, which hold 9 digits or fewer."""

MB_PER_GB = 1024


@dataclass(frozen=True)
class Engine:
    """What Galvatron found: seconds (None: nothing fits), batch, CPU seconds (None: unknown)."""

    time_s: float | None
    batch: int
    cpu_s: float | None


@dataclass(frozen=True)
class Row:
    """One comparison. time_s: ours under the judge, None when nothing fits."""

    case: str
    time_s: float | None
    ratio: float
    cpu_s: float
    gap: float | None
    engine: Engine
    complaint: str = ""

    def text(self) -> str:
        """The row as printed."""
        engine_cpu = "-" if self.engine.cpu_s is None else f"{self.engine.cpu_s:.2f}"
        columns = [
            f"{self.case:<38}",
            f"{_seconds(self.time_s):>12}",
            f"{_seconds(self.engine.time_s):>12}",
            f"{self._ratio():>10}",
            f"{self.cpu_s:>9.4f}",
            f"{engine_cpu:>12}",
            f"{'-' if self.gap is None else format(self.gap, '.1e') if self.gap else '0':>8}",
        ]
        return " ".join(columns) + (f"  {self.complaint}" if self.complaint else "")

    def _ratio(self) -> str:
        if self.time_s is None and self.engine.time_s is None:
            return "none fits"
        return "only ours" if math.isinf(self.ratio) else f"{self.ratio:.6f}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.7g}"


HEADER = (
    f"{'case':<38} {'ours_s':>12} {'engine_s':>12} {'ratio':>10} "
    f"{'cpu_s':>9} {'engine_cpu_s':>12} {'gap':>8}"
)


def compare(
    case: str,
    engine: Engine,
    plan: Callable[[], Found | None],
    judge: Callable[[Found], Judgement],
) -> Row:
    """Plans one case, judges the plan and compares."""
    started_s = time.process_time()
    found = plan()
    cpu_s = time.process_time() - started_s
    if found is None:
        return Row(case, None, 1.0 if engine.time_s is None else 0.0, cpu_s, 0.0, engine)
    judged = judge(found)
    if not judged.feasible:
        return Row(case, judged.time_s, 0.0, cpu_s, 0.0, engine, "plan does not fit when judged")
    complaint = ""
    if not math.isclose(judged.time_s, found.time_s, rel_tol=RELATIVE_ROUNDING):
        complaint = f"planned for {found.time_s:.9g} s"
    ratio = math.inf
    if engine.time_s is not None:
        ratio = (engine.time_s / engine.batch) / (judged.time_s / found.batch)
    return Row(case, judged.time_s, ratio, cpu_s, found.gap, engine, complaint)


def layerwise_row(name: str, case: Document, only_even: bool) -> Row:
    """The comparison of a layer-wise case."""
    plan = plan_layerwise if only_even else plan_uneven
    result, search = case.get("result"), case.get("search") or {}
    cpu_s = search.get("cpu_s_with_dp_memoisation")
    engine = Engine(None, 1, cpu_s)
    if result and result.get("time_cost_s"):
        time_s = _as_judged(float(result["time_cost_s"]), engine_layerwise(case))
        engine = Engine(time_s, int(result["gbsz"]), cpu_s)

    def judge(found: Found) -> Judgement:
        assert isinstance(found.plan, LayerwisePlan)
        return judge_layerwise(case, found.plan)

    return compare(name, engine, lambda: plan(case), judge)


def vldb_row(name: str, case: Document, budget: str) -> Row:
    """The comparison of one memory budget of a VLDB 2022 case."""
    budget_mb = round(float(budget.upper().removesuffix("GB")) * MB_PER_GB)
    result = case["results"][budget] or {}
    best, cpu_s = result.get("best"), result.get("cpu_s_with_cpp_dp")
    engine = Engine(None, 1, cpu_s)
    if best and best.get("time_s"):
        time_s = _as_judged(float(best["time_s"]), engine_vldb(case, best, budget_mb))
        engine = Engine(time_s, int(best["bsz"]), cpu_s)

    def judge(found: Found) -> Judgement:
        assert isinstance(found.plan, VldbPlan)
        return judge_vldb(case, found.plan, budget_mb)

    return compare(f"{name} {budget}", engine, lambda: plan_vldb(case, budget_mb), judge)


def _as_judged(stated_s: float, judged: Judgement | None) -> float:
    """The engine's time from the tables, which are rounded, if that is what its file states."""
    if judged and math.isclose(judged.time_s, stated_s, rel_tol=TABLE_ROUNDING):
        return judged.time_s
    return stated_s


def rows_of(name: str, case: Document, only_even: bool) -> list[Row]:
    """All comparisons of one case file."""
    try:
        if is_vldb(case):
            return [vldb_row(name, case, budget) for budget in case["results"]]
        return [layerwise_row(name, case, only_even)]
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        what = f"missing {error}" if isinstance(error, KeyError) else str(error)
        raise CaseError(f"{name}.json: not in the format of a planning case ({what})") from error


def main(arguments: list[str]) -> int:
    """Prints the table; the exit code is in the module docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="folder of case files")
    parser.add_argument("--even", action="store_true", help="only divisions of the tables")
    options = parser.parse_args(arguments)
    worst = math.inf
    try:
        cases = read_cases(options.directory)
        print(HEADER)
        for name, case in cases:
            for row in rows_of(name, case, options.even):
                print(row.text(), flush=True)
                worst = min(worst, row.ratio)
    except CaseError as error:
        print(f"galvatron_tables: {error}", file=sys.stderr)
        return 2
    print(f"worst ratio {worst:.9f}")
    return 1 if worst < 1 - RELATIVE_ROUNDING else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
