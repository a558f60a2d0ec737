"""Llama-2-7B on 8 devices from 8 to 80 GB: whether more memory ever makes a plan worse.

    python benchmarks/memory_sweep.py [--cluster dgx-h100] [--batch 8]

One row a budget, from the largest down: step time as the plan states it and as the search adds it
up, peak memory, CPU seconds of the search, strategy. Searches share what does not depend on the
budget, and each takes an op probe that knows the ops; capture is not counted. The last line says
whether the step never gets longer with memory, every plan fits its budget, what fits in a budget
fits in every larger one, and all searches together took at most a second. Exits 1 otherwise.
"""

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import click

from meshfold.capture.pipeline import capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.errors import InfeasibleError
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import Plan
from meshfold.memory_probe.prober import OpProber
from meshfold.models.from_argument import build_model
from meshfold.passes.planner.find import find_plan_for
from meshfold.passes.planner.shared_work import SharedWork
from meshfold.units import bytes_text, seconds_text

LLAMA_2_7B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
"""Touvron et al. 2023 (arXiv:2307.09288)."""

SEQUENCE = 2048
PRECISION: Literal["bf16"] = "bf16"
"""With parameters and optimizer states in float32."""

NUM_DEVICES = 8
BUDGETS_GB = (80, 72, 64, 56, 48, 40, 36, 32, 28, 24, 22, 20, 18, 16, 14, 12, 10, 8)
MOST_S = 1.0
EQUAL = 1e-6
"""Relative difference of two step times that is none."""


@dataclass(frozen=True)
class Row:
    """The best plan in a budget; None where nothing fits. Two step times: stated, added up."""

    budget_bytes: int
    search_s: float
    step_s: float | None = None
    added_s: float | None = None
    peak_bytes: int = 0
    label: str = ""


def faults(rows: Sequence[Row]) -> list[str]:
    """What is wrong with plans of rising budgets."""
    found = []
    for low, high in pairwise(sorted(rows, key=lambda row: row.budget_bytes)):
        budgets = f"{bytes_text(low.budget_bytes)} and {bytes_text(high.budget_bytes)}"
        if low.step_s is None or low.added_s is None:
            continue
        if high.step_s is None or high.added_s is None:
            found.append(f"of {budgets} the smaller fits, the larger does not")
            continue
        for what, a, b in (
            ("stated", low.step_s, high.step_s),
            ("added up", low.added_s, high.added_s),
        ):
            if b > a * (1 + EQUAL):
                found.append(f"between {budgets} the step, {what}, gets {b / a - 1:.2%} longer")
    found += [
        f"in {bytes_text(row.budget_bytes)} the plan needs {bytes_text(row.peak_bytes)}"
        for row in rows
        if row.peak_bytes > row.budget_bytes
    ]
    search_s = sum(row.search_s for row in rows)
    if search_s > MOST_S:
        found.append(f"searches took {search_s:.2f} s, more than {MOST_S:g} s")
    return found


def swept(graph: FoldedGraph, cluster: ClusterSpec, batch: int) -> list[Row]:
    """A row per budget, printed as it is found."""
    probe, shared = OpProber(), SharedWork()
    rows = []
    for budget_gb in BUDGETS_GB:
        budget_bytes, start_s = budget_gb * 10**9, time.process_time()
        plan: Plan | None = None
        try:
            plan = find_plan_for(
                graph,
                cluster,
                CompileOptions(memory_bytes=budget_bytes, precision=PRECISION),
                model_name="Llama-2-7B",
                batch_size=batch,
                probe=probe,
                shared=shared,
            )
        except InfeasibleError as error:
            row = Row(budget_bytes, time.process_time() - start_s, label=str(error))
        else:
            search_s, peak_bytes = time.process_time() - start_s, plan.memory.peak
            times = plan.step_s, plan.time.step_s
            row = Row(budget_bytes, search_s, *times, peak_bytes, plan.strategy.label)
        rows.append(row)
        click.echo(_text(row))
    return rows


def _text(row: Row) -> str:
    times = [
        seconds_text(seconds) if seconds is not None else "-"
        for seconds in (row.step_s, row.added_s)
    ]
    return (
        f"{bytes_text(row.budget_bytes):>9}{times[0]:>10}{times[1]:>10}"
        f"{bytes_text(row.peak_bytes):>9}{row.search_s:>8.2f}  {row.label}"
    )


def graph_of(batch: int) -> FoldedGraph:
    """The folded graph; no weights are made."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(LLAMA_2_7B))
        built = build_model(str(path), batch=batch, sequence=SEQUENCE)
    return capture(built.model, built.example_inputs, precision=PRECISION).graph


@click.command()
@click.option("--cluster", default="dgx-h100", show_default=True, help="Of 8 devices.")
@click.option("--batch", default=NUM_DEVICES, show_default=True, help="Global batch.")
def main(cluster: str, batch: int) -> None:
    """Plan in every budget and say whether memory ever hurts."""
    click.echo(f"{'budget':>9}{'step':>10}{'added up':>10}{'peak':>9}{'CPU s':>8}")
    rows = swept(graph_of(batch), resolve_cluster(cluster, NUM_DEVICES), batch)
    found = faults(rows)
    search_s = sum(row.search_s for row in rows)
    planned = sum(row.step_s is not None for row in rows)
    good = (
        f"more memory never made a plan slower, {planned} of {len(rows)} budgets have a plan, "
        f"every plan fits, {search_s:.2f} s of search"
    )
    click.echo("; ".join(found) or good)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
