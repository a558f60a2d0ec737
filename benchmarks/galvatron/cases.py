"""Galvatron's planning cases as data, and its judges: what a plan costs under Galvatron's model.

Two kinds of case files (PKU-DAIR/Hetu-Galvatron at cea12ff and the VLDB 2022 artifact in
Hsword/Hetu at 3757771; times and memory are that model's estimates, not measurements):

layer-wise   `cost_tables`: one entry per (global batch, microbatches, pipeline degree) with the
             seconds and MB of every layer and embedding strategy on every stage
vldb22       `tables`: one entry per global batch; every change of strategy between layers has a
             cost in `inter_layer_s_by_pp`

The judges here add up a finished plan layer by layer and share no code with the planners. Units: s,
MB = 1024^2 bytes, rounded up per layer as Galvatron does.
"""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Document = dict[str, Any]

LAYERWISE_KEYS = ("cluster", "layer_types", "cost_tables")
VLDB_KEYS = ("layer_types", "strategies", "tables", "results")


class CaseError(Exception):
    """A directory or case file that cannot be read; the message says which and why."""


@dataclass(frozen=True)
class LayerwisePlan:
    """One strategy name per layer, in order; layers per stage; one embedding strategy."""

    table: int
    layers: tuple[str, ...]
    embedding: str
    division: tuple[int, ...]


@dataclass(frozen=True)
class VldbPlan:
    """Strategy names of the layers of every stage that differs from the others, at one batch."""

    batch: str
    pp: int
    stages: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Found:
    """The best plan of a case, its time as the planner sees it, and the proven gap (relative, None
    without a proof)."""

    plan: LayerwisePlan | VldbPlan
    time_s: float
    batch: int
    gap: float | None


@dataclass(frozen=True)
class Judgement:
    """feasible: every stage within memory. stage_mb: memory used per stage; stage_s: seconds of one
    microbatch per stage, gradient reduction apart."""

    feasible: bool
    time_s: float
    stage_mb: tuple[int, ...]
    stage_s: tuple[float, ...]


def read_cases(directory: Path) -> list[tuple[str, Document]]:
    """Name and content of every case file, in the order of names."""
    if not directory.is_dir():
        raise CaseError(f"{directory}: no such directory")
    cases = []
    for path in sorted(directory.glob("*.json")):
        if path.name == "index.json":
            continue
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CaseError(f"{path}: not a readable JSON file ({error})") from error
        if not isinstance(document, dict) or not ("cost_tables" in document or is_vldb(document)):
            raise CaseError(f"{path}: not a planning case (neither cost_tables nor tables in it)")
        needed = VLDB_KEYS if is_vldb(document) else LAYERWISE_KEYS
        missing = [key for key in needed if not document.get(key)]
        if missing:
            raise CaseError(f"{path}: a planning case without {', '.join(missing)}")
        cases.append((path.stem, document))
    if not cases:
        raise CaseError(f"{directory}: no case files (*.json besides index.json)")
    return cases


def is_vldb(document: Document) -> bool:
    """Whether a case comes from the VLDB 2022 artifact."""
    return "tables" in document and "results" in document


def layer_type_numbers(document: Document) -> list[int]:
    """For every layer the number of its type."""
    return [
        number
        for number, layer_type in enumerate(document["layer_types"])
        for _ in range(layer_type["layer_num"])
    ]


def judge_layerwise(case: Document, plan: LayerwisePlan) -> Judgement:
    """The step time and memory of a plan under the current engine's model."""
    table = case["cost_tables"][plan.table]
    by_name = {strategy["name"]: strategy for strategy in table["layers"]}
    embedding = next(s for s in table["embedding"] if s["name"] == plan.embedding)
    types = layer_type_numbers(case)
    if not len(plan.layers) == len(types) == sum(plan.division):
        raise ValueError("the plan does not place every layer once")
    buffer_mb = _buffer_mb(table, [*(by_name[name] for name in plan.layers), embedding])
    nosync_s, sync_s, stage_mb, first = [], [], [], 0
    for stage, count in enumerate(plan.division):
        members = range(first, first + count)
        chosen = [(by_name[plan.layers[layer]], types[layer]) for layer in members]
        first += count
        times = [strategy["time_nosync_s"][kind] for strategy, kind in chosen]
        nosync_s.append(math.fsum(times) + embedding["time_nosync_s"][stage])
        sync_s.append(math.fsum(strategy["time_sync_s"][kind] for strategy, kind in chosen))
        layers_mb = sum(math.ceil(strategy["mem_mb"][kind][stage]) for strategy, kind in chosen)
        stage_mb.append(layers_mb + math.ceil(embedding["mem_mb"][stage]) + buffer_mb)
    time_s = pipeline_time_s(nosync_s, sync_s, table["chunks"])
    feasible = max(stage_mb) <= case["cluster"]["usable_memory_mb"]
    return Judgement(feasible, time_s, tuple(stage_mb), tuple(nosync_s))


def _buffer_mb(table: Document, used: Sequence[Document]) -> int:
    """The all-gather buffer: that of the largest degree, none without tensor parallelism."""
    if all(strategy["tp"] == 1 for strategy in used):
        return 0
    degree = max(max(strategy["tp"], strategy["sp"]) for strategy in used)
    return int(table["allgather_buffer_mb_by_max_tp"].get(str(degree), 0))


def pipeline_time_s(nosync_s: Sequence[float], sync_s: Sequence[float], chunks: int) -> float:
    """Galvatron's 1F1B estimate. nosync_s: seconds of each stage for one microbatch, embedding
    included; sync_s: of its layers with the exposed part of the gradient reduction."""
    stages, later_s = len(nosync_s), sum(nosync_s[1:])
    waits = min(stages - 1, chunks - 1)
    last_is_slow_s = sum(nosync_s) + nosync_s[-1] * (chunks - 1)
    forward_s = max(waits * nosync_s[0] / 3, later_s / 3)
    backward_s = max(waits * nosync_s[0] * 2 / 3, later_s * 2 / 3)
    first_is_slow_s = forward_s + backward_s + nosync_s[0] * max(0, chunks + 1 - stages)
    exposed_s = max(sync_s[i] - sum(nosync_s[: i + 1]) for i in range(stages))
    return max(last_is_slow_s, first_is_slow_s) + max(0.0, exposed_s)


def vldb_division(case: Document, batch: str, pp: int) -> list[int]:
    """Layers per stage: given for cases of several layer types, else even."""
    given = case["tables"][batch].get("pp_division")
    if isinstance(given, dict):
        given = given.get(str(pp))
    total = sum(layer_type["layer_num"] for layer_type in case["layer_types"])
    if given is not None and len(given) == pp and sum(given) == total:
        return [int(count) for count in given]
    return [total // pp] * pp


def vldb_strategies(case: Document, pp: int) -> list[int]:
    """Indices of the strategies of one pipeline degree, in the order of the conversion table."""
    return [i for i, strategy in enumerate(case["strategies"]) if strategy["pp"] == pp]


def vldb_other_mb(case: Document, batch: str, pp: int) -> int:
    """Memory besides the layers; of several layer types the artifact's code takes the last's."""
    return math.ceil(case["tables"][batch]["other_mem_mb"][-1][vldb_strategies(case, pp)[0]])


def judge_vldb(case: Document, plan: VldbPlan, budget_mb: int) -> Judgement:
    """The step time and memory of a plan under the VLDB 2022 artifact's model.

    With one layer type all stages are the same one; with several, each has its own layers and only
    the first holds the memory besides the layers.
    """
    table = case["tables"][plan.batch]
    members = vldb_strategies(case, plan.pp)
    position = {case["strategies"][index]["name"]: k for k, index in enumerate(members)}
    conversion_s = table["inter_layer_s_by_pp"][str(plan.pp)]
    types, first, stage_s, stage_mb = layer_type_numbers(case), 0, [], []
    for stage, names in enumerate(plan.stages):
        picks = [position[name] for name in names]
        kinds = types[first : first + len(names)]
        first += len(names)
        pairs = list(zip(kinds, picks, strict=True))
        times = [table["time_s"][kind][members[k]] for kind, k in pairs]
        times += [conversion_s[a][b] for a, b in zip(picks, picks[1:], strict=False)]
        stage_s.append(math.fsum(times))
        used_mb = sum(math.ceil(table["mem_mb"][kind][members[k]]) for kind, k in pairs)
        stage_mb.append(used_mb + (vldb_other_mb(case, plan.batch, plan.pp) if stage == 0 else 0))
    repeats = plan.pp if len(case["layer_types"]) == 1 else 1
    feasible = max(stage_mb) <= budget_mb
    return Judgement(feasible, repeats * sum(stage_s), tuple(stage_mb), tuple(stage_s))


def engine_layerwise(case: Document) -> Judgement | None:
    """The engine's own plan, judged; None where the file does not hold it in full."""
    result = case["result"]
    key = (result["gbsz"], result["chunks"], result["pp"])
    keys = [(table["gbsz"], table["chunks"], table["pp"]) for table in case["cost_tables"]]
    layers, embedding = result.get("layer_strategies"), result.get("embedding_strategy")
    if key not in keys or not layers or not embedding:
        return None
    number = keys.index(key)
    division = result.get("pp_division") or case["cost_tables"][number]["pp_division"]
    plan = LayerwisePlan(number, tuple(layers), embedding["name"], tuple(division))
    try:
        return judge_layerwise(case, plan)
    except (KeyError, StopIteration, ValueError):
        return None


def engine_vldb(case: Document, best: Document, budget_mb: int) -> Judgement | None:
    """The artifact's own plan at one budget, judged; None where the file does not hold it."""
    batch, pp, names = str(best["bsz"]), int(best["pp"]), best.get("plan")
    if not names or batch not in case["tables"]:
        return None
    if isinstance(names[0], str):
        division = best.get("pp_division") or vldb_division(case, batch, pp)
        if len(case["layer_types"]) == 1:
            division = [len(names)]
        ends = list(itertools.accumulate(division))
        stages = [names[end - count : end] for end, count in zip(ends, division, strict=True)]
    else:
        stages = names
    try:
        return judge_vldb(case, VldbPlan(batch, pp, tuple(map(tuple, stages))), budget_mb)
    except (KeyError, IndexError):
        return None
