"""The best plans of several settings (device counts, memory, batch, sequence) as rows: their
figures, as a table, as JSON and as CSV. No torch.

Cost is what a million tokens take: device-seconds, and money where a device-hour has a price,
    device seconds = devices x 1e6 / tokens per second
    money          = device seconds / 3600 x price of a device-hour
of samples where the model reads no tokens.
"""

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType

from meshfold.ir.plan import Plan
from meshfold.report.tables import indented, table_of
from meshfold.report.terminal import lines_view
from meshfold.units import bytes_text, count_text, seconds_text, three_digits

MILLION = 1e6
HOUR_S = 3600


@dataclass(frozen=True)
class Setting:
    """What a plan was asked for; None is the default."""

    devices: int
    batch: int | None = None
    sequence: int | None = None
    memory_bytes: int | None = None
    """Budget per device."""


@dataclass(frozen=True)
class PlanFigures:
    """What a plan predicts."""

    strategy: str
    step_s: float
    """The step time that the plan states."""
    samples_per_s: float
    tokens_per_s: float
    """0 for a model that reads no tokens."""
    mfu: float | None
    """None where the flops are not known."""
    peak_bytes: int
    gap: float | None
    """Optimality gap, see Plan.gap; None where nothing was proven."""
    device_s_per_million: float
    """Device-seconds per million tokens, or samples."""

    @classmethod
    def of(cls, plan: Plan) -> "PlanFigures":
        """The figures of a plan whose step takes time."""
        samples_per_s = plan.model.batch_size / plan.step_s
        tokens_per_s = plan.model.tokens / plan.step_s
        found = plan.throughput
        return cls(
            strategy=plan.strategy.label,
            step_s=plan.step_s,
            samples_per_s=samples_per_s,
            tokens_per_s=tokens_per_s,
            mfu=None if found is None else found.mfu,
            peak_bytes=plan.memory.peak,
            gap=plan.gap if math.isfinite(plan.gap) else None,
            device_s_per_million=plan.world_size * MILLION / (tokens_per_s or samples_per_s),
        )

    @property
    def rate(self) -> float:
        """Tokens, else samples, per second."""
        return self.tokens_per_s or self.samples_per_s

    def cost(self, price_per_device_hour: float) -> float:
        """Money for a million tokens, or samples."""
        return self.device_s_per_million / HOUR_S * price_per_device_hour


@dataclass(frozen=True)
class PlanRow:
    """The best plan of one setting, or why there is none."""

    setting: Setting
    figures: PlanFigures | None
    refusal: str = ""
    """The error in place of a plan."""


@dataclass(frozen=True)
class RowTable:
    """Rows that differ in one thing."""

    over: str
    """In what: devices, memory, batch or seq."""
    rows: tuple[PlanRow, ...]
    price: float | None = None
    """Of a device-hour."""

    def label(self, row: PlanRow) -> str:
        """Its value of what the rows differ in, for people."""
        value = self.value(row)
        return bytes_text(value) if self.over == "memory" else str(value)

    def value(self, row: PlanRow) -> int:
        """Its value of what the rows differ in."""
        setting = row.setting
        values = {
            "devices": setting.devices,
            "memory": setting.memory_bytes,
            "batch": setting.batch,
            "seq": setting.sequence,
        }
        found = values[self.over]
        assert found is not None
        return found

    @property
    def unit(self) -> str:
        """What rates count."""
        has_tokens = any(row.figures and row.figures.tokens_per_s for row in self.rows)
        return "tokens" if has_tokens else "samples"


def rows_view(table: RowTable) -> RenderableType:
    """One line per row, then what the columns are, and why rows are without a plan."""
    figures = ("step", f"{table.unit}/s", "MFU", "peak", "gap", "cost")
    page = table_of(table.over, "plan", *figures, right=(table.over, *figures), fold=("plan",))
    for row in table.rows:
        found = row.figures
        cells = ["none"] if found is None else [found.strategy, *_cells(found, table.price)]
        page.add_row(table.label(row), *cells, style="dim" if found is None else "")
    cost = "device-seconds" if table.price is None else f"at {table.price:g} per device-hour"
    lines = [
        f"peak memory; optimality gap; cost of a million {table.unit}, {cost}",
        *(f"{table.over} {table.label(r)}: {r.refusal}" for r in table.rows if r.refusal),
    ]
    return Group(indented(page), indented(lines_view(lines, "dim")))


def rate_text(figures: PlanFigures) -> str:
    """Tokens or samples per second."""
    return count_text(round(figures.rate)) if figures.rate >= 1000 else three_digits(figures.rate)


def _cells(figures: PlanFigures, price: float | None) -> list[str]:
    cost = figures.device_s_per_million if price is None else figures.cost(price)
    return [
        seconds_text(figures.step_s),
        rate_text(figures),
        "" if figures.mfu is None else f"{100 * figures.mfu:.1f} %",
        bytes_text(figures.peak_bytes),
        "" if figures.gap is None else f"{100 * figures.gap:.2f} %",
        f"{cost:,.0f}" if cost >= 1000 else three_digits(cost),
    ]


def rows_json(table: RowTable, lines: Sequence[str] = ()) -> str:
    """The rows as JSON, ending in a newline. lines: what the page says of them."""
    rows = [_record(row, table) for row in table.rows]
    return json.dumps({"over": table.over, "rows": rows, "notes": list(lines)}, indent=2) + "\n"


def rows_csv(table: RowTable) -> str:
    """The rows as CSV with a line of names; empty where there is no figure."""
    text = io.StringIO()
    records = [_record(row, table) for row in table.rows]
    writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def _record(row: PlanRow, table: RowTable) -> dict[str, Any]:
    """The same names in every row."""
    names = PlanFigures.__dataclass_fields__
    figures = asdict(row.figures) if row.figures else dict.fromkeys(names)
    is_priced = row.figures is not None and table.price is not None
    cost = row.figures.cost(table.price) if is_priced and row.figures and table.price else None
    return {
        **asdict(row.setting),
        **figures,
        "price_per_million": cost,
        "refusal": row.refusal or None,
    }
