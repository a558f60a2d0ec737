"""What verify found: differences of losses, gradients and trained parameters, the verdict, and all
of it as text and JSON."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

TOLERANCE = 1e-10
"""Right programs differ by 1e-13 and less, wrong ones by 1e-3 and more."""
NUM_STEPS = 3
"""Steps of the plan's optimizer before parameters are compared."""
ROUNDINGS = 1e3
"""A difference of as many roundings (meshfold.validation.rounding) is none, up to the size of the
largest tensor."""
OWN_ROUNDINGS = 30.0
"""A difference of as many roundings is none, whatever its size: a model that is so ill-conditioned
(batch norms of a few numbers, one behind another) does not agree with itself any better."""
NUM_WORST = 5
"""Gradients or parameters that are printed."""


@dataclass(frozen=True)
class TensorDifference:
    """A gradient, or a parameter after NUM_STEPS steps: its largest entry, and the largest of the
    difference, over all shards."""

    name: str
    largest: float
    difference: float
    relative: float
    rounding: float = 0.0
    """How far rounding alone moves it in one process, relative to its largest entry, where it
    agrees to no more than that."""


@dataclass(frozen=True)
class VerifyReport:
    """The comparison of a plan on local processes with its model in one process."""

    world_size: int
    strategy: str
    eager_loss: float
    """Loss of the model in one process."""
    loss: float
    """The loss that is furthest from it, over all ranks."""
    gradients: tuple[TensorDifference, ...]
    """Worst first."""
    outputs: tuple[TensorDifference, ...] = ()
    """What a step returns, where that is more than its loss; worst first."""
    parameters: tuple[TensorDifference, ...] = ()
    """After NUM_STEPS steps of `optimizer`; worst first."""
    optimizer: str = ""
    first_divergence: str = ""
    """The first op whose value or gradient differs, or how the captured program differs from the
    model; empty if the program is right."""
    num_collectives: int = 0
    """Collectives that a rank starts in a step."""
    collective_mismatch: str = ""
    """Where two ranks of a group start different collectives, empty if nowhere
    (meshfold.validation.collective_order)."""
    shrunk: tuple[str, ...] = ()
    """If a scaled-down model ran instead: what became smaller and what it does not show."""
    tolerance: float = TOLERANCE

    @property
    def loss_difference(self) -> float:
        """Relative to the loss, or absolute for a loss below 1."""
        return abs(self.loss - self.eager_loss) / max(1.0, abs(self.eager_loss))

    @property
    def passed(self) -> bool:
        compared = (*self.outputs, *self.gradients, *self.parameters)
        return not self.collective_mismatch and all(
            d <= self.tolerance for d in (self.loss_difference, *(c.relative for c in compared))
        )

    @property
    def only_parameters_differ(self) -> bool:
        """Whether the first step is right, and what later ones make of the parameters is not."""
        return not self.passed and replace(self, parameters=()).passed

    @property
    def verdict(self) -> str:
        """One line."""
        if self.passed:
            loss = f"loss, {len(self.outputs)} outputs" if self.outputs else "loss"
            what = f"{loss} and {len(self.gradients)} gradients"
            if self.parameters:
                steps = f"{NUM_STEPS} steps of {self.optimizer}"
                what = f"{loss}, {len(self.gradients)} gradients and parameters after {steps}"
            where = ", on a scaled-down model and plan" if self.shrunk else ""
            moved = max((c.rounding for c in (*self.gradients, *self.parameters)), default=0.0)
            where += f", or to what rounding alone does to the model ({moved:.0e})" if moved else ""
            return f"{what} agree to {self.tolerance:.0e}{where}"
        if not math.isfinite(self.eager_loss):
            return (
                f"the loss of the model in one process is {self.eager_loss}, which can be compared "
                "with nothing; mend the model, or give example inputs of which it is finite"
            )
        if self.collective_mismatch:
            found = self.collective_mismatch
            return f"ranks start different collectives: {found}; report it with the plan file"
        where = f"; {self.first_divergence}" if self.first_divergence else ""
        return f"{self._worst()}{where}; report it with the plan file"

    def _worst(self) -> str:
        """What differs most."""
        kinds = {
            "outputs": self.outputs,
            "gradients": self.gradients,
            "parameters": self.parameters,
        }
        for kind, compared in kinds.items():
            wrong = sum(not c.relative <= self.tolerance for c in compared)
            if wrong:
                after = f" after {NUM_STEPS} steps" if kind == "parameters" else ""
                return (
                    f"{wrong} of {len(compared)} {kind} differ{after}, worst {compared[0].name} by "
                    f"{compared[0].relative:.1e} (tolerance {self.tolerance:.0e})"
                )
        return f"the losses differ, {self.loss!r} against {self.eager_loss!r}"


Sizes = Mapping[str, tuple[float, float]]
"""The largest entry of a tensor and of its difference on this rank, by name."""
_UNKNOWN: Mapping[str, float] = MappingProxyType({})


def differences(
    by_rank: Sequence[Sizes], rounding: Mapping[str, float] = _UNKNOWN, bound: float = 0.0
) -> tuple[TensorDifference, ...]:
    """The worst of all ranks per name, worst first. A rank has the names of its stages.

    A difference is relative to the largest entry of its tensor. Of one that is zero but for
    rounding, it is relative to the size of the terms that would leave as much rounding; no such
    terms are larger than `bound` and all tensors. rounding: by name, where it is known. What
    differs by no more than rounding alone moves it agrees, and says so.
    """
    first = {name: size for sizes in by_rank for name, size in sizes.items()}
    largest = max((bound, *(size for size, _ in first.values())))
    found = []
    for name, (size, _) in first.items():
        worst = max((sizes[name][1] for sizes in by_rank if name in sizes), key=badness)
        moved = rounding.get(name, 0.0)
        scale = max(size, min(moved * ROUNDINGS / TOLERANCE, largest))
        relative = worst / scale if scale else math.inf if worst else 0.0
        own = 0.0
        if TOLERANCE < relative and worst <= moved * OWN_ROUNDINGS:
            relative, own = worst / moved / OWN_ROUNDINGS * TOLERANCE, moved / scale
        found.append(TensorDifference(name, size, worst, relative, own))
    return tuple(sorted(found, key=lambda d: (-badness(d.relative), d.name)))


def badness(difference: float) -> float:
    """Its size; NaN is worse than anything."""
    return math.inf if math.isnan(difference) else abs(difference)


def report_json(report: VerifyReport) -> str:
    """The report as JSON, ending in a newline."""
    facts = asdict(report) | {"passed": report.passed, "verdict": report.verdict}
    return json.dumps(facts, indent=2) + "\n"


def report_view(report: VerifyReport) -> RenderableType:
    """The worst parameters as a table."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("", overflow="fold")
    for name in ("one process", f"{report.world_size} processes", "difference"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row(
        "loss", f"{report.eager_loss:.12g}", f"{report.loss:.12g}", f"{report.loss_difference:.1e}"
    )
    worst = [_worst_view(f"worst of {len(report.gradients)} gradients", report.gradients, report)]
    if report.parameters:
        title = f"worst parameters after {NUM_STEPS} steps of {report.optimizer}"
        worst.append(_worst_view(title, report.parameters, report))
    style = "bold green" if report.passed else "bold red"
    headline = Text(f"{report.strategy} on {report.world_size} local processes, float64\n")
    verdict = Text(f"\n{report.verdict}", style=style)
    order = Text(f"\n{report.num_collectives} collectives a step, in one order on all ranks")
    small = [Text("a scaled-down model and plan, not the real size:")] if report.shrunk else []
    small += [Text(f"  {change}") for change in report.shrunk] + [Text()] * bool(report.shrunk)
    parts = (*small, headline, table, *(part for view in worst for part in (Text(), view)))
    return Group(*parts, order, verdict) if report.passed else Group(*parts)


def _worst_view(
    title: str, compared: Sequence[TensorDifference], report: VerifyReport
) -> RenderableType:
    view = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    view.add_column(title, overflow="fold")
    for name in ("largest entry", "difference", "relative"):
        view.add_column(name, justify="right", no_wrap=True)
    for c in compared[:NUM_WORST]:
        bad = not c.relative <= report.tolerance
        view.add_row(
            c.name,
            f"{c.largest:.3g}",
            f"{c.difference:.1e}",
            f"{c.relative:.1e}",
            style="bold red" if bad else "",
        )
    return view
