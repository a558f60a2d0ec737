"""Types of a plan that were changed are refused, or the program is still right."""

import random
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import pytest
import torch
from support.processes.pool import Pools
from support.programs.local_programs import errors_of_a_step, one_process
from support.programs.type_changes import captured_of, changed_plans, model_of
from torch import Tensor, nn

from meshfold.api import plan_captured
from meshfold.capture.pipeline import capture
from meshfold.codegen.emit.pipeline import EmittedPipeline, emit_plan
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.errors import PlanMismatchError
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import Plan
from meshfold.ir.spmd import PARTIAL, Layout, SpmdType
from meshfold.ir.strategy import KeptResults, RegionTyping
from meshfold.passes.rules.table import region_rules, typing_of
from meshfold.plan_file.io import plan_to_json
from meshfold.validation.float64_mode import float64_everywhere

PINS: Mapping[str, Mapping[str, int]] = {
    "dp": {"dp": 4},
    "zero3": {"dp": 4, "zero": 3},
    "hsdp": {"dp": 4, "zero": 3, "dp_shard": 2},
    "tp+sp": {"dp": 2, "tp": 2, "sp": 1},
    "tp": {"tp": 4},
    "pp": {"pp": 2, "tp": 2, "microbatches": 2},
    "cp": {"dp": 2, "cp": 2},
    "ep": {"dp": 2, "ep": 2},
}
FAMILIES = ("mlp", "gpt2", "llama", "mixtral")
CASES = [
    (family, pins)
    for family in FAMILIES
    for pins in PINS
    if (pins != "ep" or family == "mixtral")
    and (family != "mlp" or pins not in ("pp", "cp"))
    and (family == "mlp" or pins != "hsdp")
]
SAMPLES = 48
"""Changes that are held against the tables, per case: 1,104 in all."""
QUICK = {("mlp", "tp+sp"), ("mlp", "zero3"), ("gpt2", "pp"), ("mixtral", "ep")}
MOST_PROGRAMS = 14
"""Changed programs that run, per case; `pytest --exhaustive` runs all, some 70."""
MOST_ON_PROCESSES = 5
"""The same where every rank is a process, and emits the program."""
TOLERANCE = 1e-10
EmittedPlan = EmittedProgram | EmittedPipeline


@cache
def plan_of(family: str, pins: str) -> Plan:
    options = CompileOptions(pins={"microbatches": 1, **PINS[pins]})
    return plan_captured(captured_of(family), family, "local-cpux4", options)


def emitted(family: str, plan: Plan) -> str:
    """The digest of the program, or the line that refuses it."""
    try:
        return emit_plan(captured_of(family).graph, plan).digest
    except PlanMismatchError as error:
        line = str(error)
        assert "\n" not in line
        assert "region " in line or "the plan " in line
        return f"refused: {line}"


@pytest.mark.rotated(2)
@pytest.mark.parametrize(
    ("family", "pins"),
    [pytest.param(*c, marks=() if c in QUICK else pytest.mark.slow) for c in CASES],
)
def test_a_changed_type_is_refused_in_one_line_or_emitted(family: str, pins: str) -> None:
    plan = plan_of(family, pins)
    changes = list(changed_plans(plan))
    sample = random.Random(f"{family} {pins}").sample(changes, min(SAMPLES, len(changes)))
    refused = sum(emitted(family, changed).startswith("refused") for _, changed in sample)
    assert 0 < refused


def programs_of(
    family: str, pins: str, most: int | None
) -> dict[str, tuple[str, Plan, EmittedPlan]]:
    """What is not refused: what was changed, the plan and its program, by digest. Changes of slots
    and outputs, and one in 20 of those of ops: a sample, of which `most` (None: all) are taken."""
    plan = plan_of(family, pins)
    draw = random.Random(f"{family} {pins}")
    changes = [c for c in changed_plans(plan) if ", op " not in c[0] or draw.random() <= 0.05]
    draw.shuffle(changes)
    unchanged = emit_plan(captured_of(family).graph, plan)
    programs = {unchanged.digest: ("unchanged", plan, unchanged)}
    for where, changed in changes:
        if most is not None and len(programs) > most:
            break
        try:
            program = emit_plan(captured_of(family).graph, changed)
        except PlanMismatchError:
            continue
        programs.setdefault(program.digest, (where, changed, program))
    return programs


@pytest.mark.rotated(2)
@pytest.mark.parametrize(
    ("family", "pins"),
    [
        pytest.param(*case, marks=() if case == ("mlp", "tp+sp") else pytest.mark.slow)
        for case in CASES
        if case[1] != "pp"
    ],
)
def test_what_is_not_refused_computes_what_one_process_does(
    family: str, pins: str, pytestconfig: pytest.Config
) -> None:
    most = None if pytestconfig.getoption("exhaustive") else MOST_PROGRAMS
    captured, (model, batch) = captured_of(family), model_of(family)
    right, wrong = one_process(model, batch), {}
    for where, _, program in programs_of(family, pins, most).values():
        assert isinstance(program, EmittedProgram)
        with float64_everywhere():
            found = errors_of_a_step(model, batch, captured, program, right)
        worst = [error for errors in found for error in errors.values()]
        if not all(error <= TOLERANCE for error in worst):
            wrong[where] = max(worst)
    assert not wrong


@pytest.mark.multiprocess
@pytest.mark.rotated(3)
@pytest.mark.parametrize(
    ("family", "pins"),
    [
        ("mlp", "tp+sp"),
        *(pytest.param(*case, marks=pytest.mark.slow(20)) for case in CASES if case[1] == "pp"),
    ],
)
def test_the_same_on_processes(
    pools: Pools, family: str, pins: str, pytestconfig: pytest.Config
) -> None:
    """Stages are on processes alone."""
    most = None if pytestconfig.getoption("exhaustive") else MOST_ON_PROCESSES
    programs = programs_of(family, pins, most).values()
    texts = [plan_to_json(plan) for _, plan, _ in programs]
    by_rank = pools.run(
        4, "support.programs.type_changes:worst_errors", family, texts, timeout_s=900.0
    )
    worst = map(max, zip(*by_rank, strict=True))
    wrong = {
        where: error
        for (where, _, _), error in zip(programs, worst, strict=True)
        if not error <= TOLERANCE
    }
    assert not wrong


def test_the_edit_that_once_trained_with_wrong_gradients_is_refused() -> None:
    plan = plan_of("mlp", "dp")
    by_place = dict(changed_plans(plan))
    (where,) = (w for w in by_place if "slot 1: I on axis 0 becomes R" in w)
    with pytest.raises(PlanMismatchError, match="region A, up.weight: stored as R"):
        emit_plan(captured_of("mlp").graph, by_place[where])


REFUSALS = {
    "a tied parameter has one stored layout": ("gpt2", "zero3"),
    "stored as P; a parameter is stored Invariant": ("mlp", "dp"),
    "an input as R; ranks read it Invariant": ("mlp", "dp"),
    "must leave Invariant on all axes": ("mlp", "dp"),
    "has rows at their experts, outside of a region": ("mlp", "dp"),
    "no conversion leads from": ("mlp", "tp+sp"),
    "a buffer as S": ("bert", "dp"),
}
"""What a line says, and a plan one of whose changes it refuses."""


@pytest.mark.parametrize("line", REFUSALS)
def test_a_line_says_what_is_wrong(line: str) -> None:
    family, pins = REFUSALS[line]
    plan = plan_of(family, pins)
    outside = (plan for where, plan in changed_plans(plan) if ", op " not in where)
    assert any(line in emitted(family, changed) for changed in outside)


ARITIES = {
    "slots": lambda t: replace(t, slots=t.slots[1:]),
    "outputs": lambda t: replace(t, outputs=()),
    "a layout": lambda t: replace(t, slots=((), *t.slots[1:])),
    "rules": lambda t: replace(t, ops=(replace(t.ops[0], rules=()), *t.ops[1:])),
    "inputs": lambda t: replace(t, ops=(replace(t.ops[0], inputs=()), *t.ops[1:])),
    "results": lambda t: replace(t, ops=(replace(t.ops[0], outputs=()), *t.ops[1:])),
    "an op that is kept": lambda t: keeping(t, KeptResults((99,))),
    "a value that is kept": lambda t: keeping(t, KeptResults((), ((99, t.slots[0]),))),
    "a layout that is kept": lambda t: keeping(t, KeptResults((), ((0, ()),))),
}


def keeping(typing: RegionTyping, kept: KeptResults) -> RegionTyping:
    return replace(typing, recompute="selective", kept=kept)


@pytest.mark.parametrize("what", ARITIES)
def test_missing_layouts_and_rules_are_refused(what: str) -> None:
    plan = plan_of("mlp", "tp+sp")
    (region,) = plan.regions
    changed = replace(plan, regions=(replace(region, typing=ARITIES[what](region.typing)),))
    assert emitted("mlp", changed).startswith("refused: ")


def test_copies_are_of_parameters_and_as_many_as_replicas() -> None:
    plan = plan_of("mlp", "hsdp")
    region = next(r for r in plan.regions if r.parameters)
    slots = list(region.typing.slots)
    k = next(k for k, layout in enumerate(slots) if layout[0].copies == 2)

    def with_slots(changed: tuple[Layout, ...]) -> Plan:
        typing = replace(region.typing, slots=changed)
        regions = tuple(replace(r, typing=typing) if r is region else r for r in plan.regions)
        return replace(plan, regions=regions)

    four = (*slots[:k], (replace(slots[k][0], copies=4),), *slots[k + 1 :])
    assert "of which the mesh has 2 replicas" in emitted("mlp", with_slots(four))
    v = next(v for v, layout in enumerate(slots) if layout[0].copies == 1)
    other = (*slots[:v], (SpmdType("S", 0, copies=2),), *slots[v + 1 :])
    assert "only parameters are stored so" in emitted("mlp", with_slots(other))


class Counted(nn.Module):
    """A loss over how many labels count, which are whole numbers, times flags."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        counts = labels != -1
        y = self.up(x) * counts[:, None]
        return y.pow(2).sum() * labels.sum() / counts.sum().clamp(min=1)


def counted() -> tuple[Counted, dict[str, Tensor]]:
    torch.manual_seed(0)
    labels = torch.tensor([3, -1, -1, 2, -1, 1, 0, 4])
    return Counted().double(), {"x": torch.randn(8, 8, dtype=torch.float64), "labels": labels}


@pytest.mark.parametrize("pins", ["dp", "zero3", "tp+sp"])
def test_whole_numbers_are_summed_over_ranks(pins: str) -> None:
    model, batch = counted()
    with float64_everywhere():
        captured = capture(model, batch)
    options = CompileOptions(pins={"microbatches": 1, **PINS[pins]})
    plan = plan_captured(captured, "counted", "local-cpux4", options)
    graph, typing = captured.graph.regions[0].graph, plan.regions[0].typing
    sums = {
        graph.values[op.outputs[0]].dtype
        for op, chosen in zip(graph.ops, typing.ops, strict=True)
        if op.target == "aten.sum.default" and PARTIAL in chosen.outputs[0]
    }
    assert sums == {"float64", "int64"}
    program = emit_plan(captured.graph, plan)
    assert isinstance(program, EmittedProgram)
    with float64_everywhere():
        found = errors_of_a_step(model, batch, captured, program)
    assert max(max(errors.values()) for errors in found) <= 1e-12


def test_flags_are_never_pending_sums() -> None:
    with float64_everywhere():
        captured = capture(*counted())
    options = CompileOptions(pins={"microbatches": 1, "tp": 4})
    plan = plan_captured(captured, "counted", "local-cpux4", options)
    graph = captured.graph.regions[0].graph
    (k,) = (
        k
        for k, op in enumerate(graph.ops)
        if op.target == "aten.mul.Tensor" and graph.values[op.operands[1]].dtype == "bool"
    )
    (rule,) = (r for r in region_rules(graph, (4,))[k][0] if r.inputs[1] == PARTIAL)
    region = plan.regions[0]
    ops = list(region.typing.ops)
    ops[k] = typing_of(graph, k, (rule,))
    changed = replace(plan, regions=(replace(region, typing=replace(region.typing, ops=ops)),))
    with pytest.raises(PlanMismatchError, match="I to P; flags are no pending sums"):
        emit_plan(captured.graph, changed)
