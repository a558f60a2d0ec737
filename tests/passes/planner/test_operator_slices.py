"""When operators run in slices, and what plans say of it."""

from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from meshfold.capture.pipeline import capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.errors import InfeasibleError, OptionError
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import Plan
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.planner.check import price_plan
from meshfold.passes.planner.find import find_plan_for
from meshfold.passes.planner.operator_slices import COUNTS, NEEDS_SLICES, with_slices
from meshfold.plan_file.io import plan_from_json, plan_to_json
from meshfold.units import bytes_text

PROBER = OpProber()
PINS = {"dp": 4, "zero": 3, "microbatches": 1, "recompute": "none"}


class Wide(nn.Module):
    """One operator with nearly all parameters: 128 MB of float32."""

    def __init__(self, width: int = 4096) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))).square().mean()


@cache
def graph() -> FoldedGraph:
    with torch.device("meta"):
        model = Wide()
    return capture(model, {"x": torch.zeros(8, 4096)}).graph


def plan(folded: FoldedGraph | None = None, **options) -> Plan:
    return find_plan_for(
        folded or graph(),
        resolve_cluster("local-cpu", 4),
        CompileOptions(**options),
        model_name="wide",
        batch_size=8,
        probe=PROBER,
    )


def test_slices_hold_less_of_what_is_gathered() -> None:
    whole, sliced = plan(pins=PINS), plan(pins={**PINS, "slices": 4})
    assert (whole.slices, sliced.slices) == (1, 4)
    # Of 128 MB one slice of 32 is gathered and one in flight; so is its gradient.
    assert whole.memory.peak - sliced.memory.peak > 100e6
    # More launches and collectives, of which more hide behind products: here within 1 %.
    assert sliced.step_s == pytest.approx(whole.step_s, rel=0.01)
    assert sliced.model == whole.model


def test_a_plan_with_slices_is_read_and_priced_again() -> None:
    found = plan_from_json(plan_to_json(plan(pins={**PINS, "slices": 4})))
    again = price_plan(graph(), found, PROBER)
    assert again.memory == found.memory and again.time.step_s == pytest.approx(found.time.step_s)


def test_what_does_not_fit_is_made_to_fit_with_the_fewest_slices_and_says_so() -> None:
    two, four = (plan(pins={**PINS, "slices": n}).memory.peak for n in (2, 4))
    memory = (two + four) // 2
    found = plan(pins=PINS, memory_bytes=memory)
    assert found.slices == 4 and found.memory.peak <= memory and NEEDS_SLICES in found.notes
    with pytest.raises(InfeasibleError):
        plan(pins={**PINS, "slices": 1}, memory_bytes=memory)


def test_operators_that_a_bucket_holds_are_not_tried_in_slices() -> None:
    def request(num_devices: int, folded: FoldedGraph) -> SimpleNamespace:
        options = CompileOptions()
        cluster = SimpleNamespace(num_devices=num_devices)
        return SimpleNamespace(folded=folded, options=options, cluster=cluster)

    small = capture(Wide(64), {"x": torch.zeros(8, 64)}).graph
    assert not list(with_slices(request(4, small))) and not list(with_slices(request(1, graph())))
    assert bytes_text(4 * 8192 * 4096) == "134 MB" and COUNTS[0] == 2


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"slices": 2}, "pin slices=2: no linear layer or embedding of this model"),
        ({"slices": 2, "offload": "optimizer"}, "pin slices=2: parameters in slices cannot be on"),
    ],
)
def test_pins_that_cannot_be_kept(pins: dict[str, object], message: str) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight).mean()

    folded = capture(Scaled(), {"x": torch.zeros(8, 8)}).graph if len(pins) == 1 else graph()
    with pytest.raises(OptionError, match=message):
        plan(folded, pins=pins)
