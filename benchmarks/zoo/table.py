"""docs/survey.md, of what benchmarks/survey.py found."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol


class Row(Protocol):
    """What was found of one model (benchmarks/survey.py)."""

    @property
    def library(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def capture(self) -> Mapping[str, Any]: ...
    @property
    def num_ops(self) -> int: ...
    @property
    def num_distinct_ops(self) -> int: ...
    @property
    def fallback_ops(self) -> Sequence[str]: ...
    @property
    def plans(self) -> Mapping[str, Mapping[str, Any]]: ...


INTRODUCTION = """# Survey of models

Made by `python benchmarks/survey.py --results survey.json --write docs/survey.md`, with the
packages of the extra `survey`. Every model is built small from its configuration and captured
unmodified, and each plan is held against one process as `meshfold verify` does it: float64, the
loss, every gradient, and every parameter after three steps of AdamW. A figure is the largest
relative difference; the plans are on two gloo processes. `*`: with one microbatch, since the batch
cannot be split; `-`: refused in one line, which stands below. The script has more models than the
table: what was not run is not in it, and a row stays as it was found until its model is run again.
"""


def document(found: Sequence[Row], columns: Iterable[str]) -> str:
    """Markdown: a summary by library, the models, and why what is refused is refused."""
    names = tuple(columns)
    rows = sorted(found, key=lambda row: (row.library, row.name))
    parts = [INTRODUCTION, _summary(rows, names), "\n## Models\n", _models(rows, names)]
    refused = _refusals(rows)
    if refused:
        parts += ["\n## Refused\n", refused]
    return "\n".join(parts) + "\n"


def _summary(rows: Sequence[Row], columns: Sequence[str]) -> str:
    lines = [
        f"| library | models | captured | {' | '.join(columns)} | under one or more |",
        f"|---|---|---|{'---|' * (len(columns) + 1)}",
    ]
    libraries = list(dict.fromkeys(row.library for row in rows))
    for library in (*libraries, ""):
        of_it = [row for row in rows if library in ("", row.library)]
        captured = sum(row.capture["kind"] == "ok" for row in of_it)
        counts = [sum(_is_right(row, column) for row in of_it) for column in columns]
        some = sum(any(_is_right(row, column) for column in columns) for row in of_it)
        numbers = " | ".join(map(str, (len(of_it), captured, *counts, some)))
        lines.append(f"| {library or 'all'} | {numbers} |")
    return "\n".join(lines)


def _is_right(row: Row, column: str) -> bool:
    return row.plans.get(column, {}).get("kind") == "ok"


def _models(rows: Sequence[Row], columns: Sequence[str]) -> str:
    lines = [
        f"| library | model | ops → distinct | {' | '.join(columns)} | run whole, without a rule |",
        f"|---|---|---|{'---|' * (len(columns) + 1)}",
    ]
    for row in rows:
        cells = " | ".join(_cell(row.plans.get(column)) for column in columns)
        whole = ", ".join(op.removeprefix("aten.") for op in row.fallback_ops) or "-"
        ops = f"{row.num_ops} → {row.num_distinct_ops}" if row.num_ops else "-"
        lines.append(f"| {row.library} | {row.name} | {ops} | {cells} | {whole} |")
    return "\n".join(lines)


def _cell(plan: Mapping[str, Any] | None) -> str:
    if plan is None or plan["kind"] == "refused":
        return "-"
    mark = "*" if plan.get("otherwise") else ""
    return f"{plan['worst']:.0e}{mark}" if plan["kind"] == "ok" else f"**{plan['kind']}**"


def _refusals(rows: Sequence[Row]) -> str:
    """A line for each reason, with the models and plans that it is of."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        for column, outcome in (("", row.capture), *row.plans.items()):
            if outcome["kind"] == "refused":
                text = outcome["text"].rpartition(" (/")[0] or outcome["text"]
                reasons.setdefault(text, []).append(f"{row.name} {column}".strip())
    return "\n".join(f"- {text}: {', '.join(models)}." for text, models in sorted(reasons.items()))
