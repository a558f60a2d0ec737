"""The table of errors that plans print (cost_models/hardware/error_bands.json), of scored runs."""

import json
from collections import defaultdict
from collections.abc import Sequence
from statistics import mean

import numpy as np

from meshfold.cost_models.hardware.error_bands import Kind, PlanKind, family_of_device, spread
from published.runs import Run
from published.score import Scored, timed

LOW, HIGH = 10, 90
"""Percentiles."""
DIGITS = 4


def kind_of(run: Run) -> Kind:
    """What a plan for the run is told apart by."""
    plan: PlanKind = "one pass" if run.num_microbatches == 1 else "microbatches"
    if run.pp > 1:
        plan = "stages"
    return (
        family_of_device(run.gpu),
        plan,
        spread(run.num_gpus, -(-run.num_gpus // run.gpus_per_node)),
    )


def bands_json(scored: Sequence[Scored], command: str) -> str:
    """The file, ending in a newline. command: that measured them. memory: errors of the
    peak, of all runs that say theirs."""
    groups: dict[Kind, list[float]] = defaultdict(list)
    for one in timed(scored):
        groups[kind_of(one.run)].append(one.error)
    memory = [m for one in scored if (m := one.memory_error) is not None]
    bands = [
        {"family": family, "kind": plan, "spread": width, **_figures(groups[family, plan, width])}
        for family, plan, width in sorted(groups)
    ]
    rows = ",\n    ".join(json.dumps(band) for band in bands)
    return (
        "{\n"
        '  "about": "Errors of predicted step times against published runs, predicted / published '
        f'- 1: mean, {LOW}th and {HIGH}th percentile.",\n'
        f'  "measured_by": {json.dumps(command)},\n'
        f'  "memory": {json.dumps(_figures(memory) if memory else None)},\n'
        f'  "bands": [\n    {rows}\n  ]\n'
        "}\n"
    )


def _figures(errors: Sequence[float]) -> dict[str, float]:
    low, high = (float(q) for q in np.percentile(errors, (LOW, HIGH)))
    figures = {"bias": mean(errors), "low": low, "high": high}
    return {"rows": len(errors), **{k: round(v, DIGITS) for k, v in figures.items()}}
