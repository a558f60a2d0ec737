"""The answer of `explain --why-not` as text."""

import io
from dataclasses import replace

from rich.console import Console
from support.programs.plans import GIB, example_plan

from meshfold.ir.plan import Plan
from meshfold.report.why_not import Change, LinkUse, StepParts, WhyNot, why_not_view

OURS = StepParts(
    1.0, {"compute": 0.9, "exposed communication": 0.1}, {"network": LinkUse(0.2, 10**9, 0.1)}, 0.0
)
THEIRS = StepParts(
    1.5,
    {"compute": 0.8, "exposed communication": 0.7},
    {"network": LinkUse(0.8, 5 * 10**9, 0.7), "nvlink": LinkUse(0.25)},
    0.3,
)


def page(answer: WhyNot) -> str:
    stream = io.StringIO()
    Console(file=stream, width=90).print(why_not_view(answer))
    return stream.getvalue()


def words(answer: WhyNot) -> str:
    return " ".join(page(answer).split())


def plan(sum_s: float = 1.0) -> Plan:
    made = example_plan()
    none = {"backward_s": 0.0, "exposed_communication_s": 0.0, "optimizer_s": 0.0}
    return replace(made, time=replace(made.time, forward_s=sum_s, **none))


def test_a_slower_plan_with_the_pins() -> None:
    changes = (Change("batch", "64", "32, 64"), Change("memory per device", "", "8 x and 1/8"))
    text = words(WhyNot("tp=2", plan(), plan(1.5), (OURS, THEIRS), changes=changes))
    assert text.startswith("the best plan with tp=2 is dp2 x tp4+sp, zero3: 1.50 s, 50.0 % slower")
    assert "compute 900 ms 800 ms -100 ms of it recomputed 0 ms 300 ms +300 ms" in text
    assert "exposed communication 100 ms 700 ms +600 ms step 1.00 s 1.50 s +500 ms" in text
    assert "network bytes 1.00 GB 5.00 GB seconds 200 ms 800 ms exposed 100 ms 700 ms" in text
    assert "nvlink seconds - 250 ms of the collectives" in text
    assert "batch wins at 64 (tried 32, 64)" in text
    assert "memory per device does not make it win (tried 8 x and 1/8)" in text


def test_a_faster_plan_with_the_pins() -> None:
    """By the simulated step; the sums of the search say 20 % slower."""
    assert "compares sums, where it is 20.0 % slower" in words(
        WhyNot("tp=2", plan(), plan(1.2), (THEIRS, OURS))
    )
    text = words(WhyNot("tp=2", plan(), plan(0.9), (THEIRS, OURS)))
    assert "33.3 % faster" in text and "was pinned to tp=4; plan again without" in text
    unpinned = replace(plan(), pins={})
    assert "or edited" in words(WhyNot("tp=2", unpinned, plan(0.9), (THEIRS, OURS)))


def test_what_memory_forbids() -> None:
    large = replace(plan(0.5), memory=replace(plan().memory, activations=40 * GIB))
    refusal = "nothing fits in 40 GB"
    text = words(WhyNot("tp=2", plan(), None, None, refusal, large))
    assert text.startswith("no plan with tp=2: nothing fits in 40 GB")
    assert "memory forbids it: dp2 x tp4+sp, zero3, 500 ms, needs" in text
    text = words(WhyNot("tp=2", plan(), plan(1.5), (OURS, THEIRS), unlimited=large))
    assert "memory forbids its fastest form" in text


def test_a_rule_and_a_pin_that_is_kept_are_one_line() -> None:
    text = page(WhyNot("tp=3", plan(), None, None, "pin tp=3 cannot be kept"))
    assert text.strip() == "no plan with tp=3: pin tp=3 cannot be kept"
    text = page(WhyNot("tp=4", plan(), plan(), None, is_kept=True))
    assert text.strip() == "the plan keeps tp=4: dp2 x tp4+sp, zero3"
