"""Ops of torch.library, and rules that users give of their ops and Functions."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from support.models.functions import Gelu, LinearLoss, function_model
from support.models.library_ops import swishing_model
from support.programs.local_programs import emit_uniform, errors_of_a_step
from torch import Tensor, nn
from torch.autograd import Function

import meshfold
from meshfold.capture.pipeline import Captured, capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.cost_models.memory.op_memory import ProbeKey, dense_spec
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.errors import CaptureError, OptionError, PlanMismatchError
from meshfold.ir.op_graph import OpGraph, Ref
from meshfold.ir.strategy import UniformStrategy
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.price.op_time import op_time
from meshfold.passes.rules.table import region_rules
from meshfold.passes.split.microbatch import MicrobatchGraphs
from meshfold.validation.float64_mode import float64_everywhere

pytestmark = pytest.mark.xdist_group("custom rules")

EXACT = 1e-12
LOSS = meshfold.register_rule(
    LinearLoss,
    "n _, _ _, n ->",
    flops=lambda x, weight, target: 6 * x[0] * x[1] * weight[0],
    saved_bytes=lambda x, weight, target: 8 * (x[0] * x[1] + weight[0] * weight[1]),
)


@cache
def ruled() -> tuple[nn.Module, dict[str, Tensor], Captured]:
    model, batch = function_model(2, "sum")
    with float64_everywhere():
        return model, batch, capture(model, batch, rules=[LOSS])


def the_op(found: Captured, name: str) -> tuple[OpGraph, int]:
    """Graph and number of the op called `name`."""
    return next(
        (region.graph, k)
        for region in found.graph.regions
        for k, op in enumerate(region.graph.ops)
        if name in op.target
    )


@pytest.mark.parametrize(
    "strategy",
    [UniformStrategy(dp=4), UniformStrategy(dp=2, tp=2, sequence_parallel=True, zero=3)],
    ids=lambda s: s.label,
)
def test_a_rule_lets_ranks_share_a_loss(strategy: UniformStrategy) -> None:
    model, batch, found = ruled()
    program = emit_uniform(found, strategy, 8)
    graph, k = the_op(found, "LinearLoss")
    typings = (r.typing for r in program.regions if program.folded.regions[r.region].graph is graph)
    assert next(typings).ops[k].rules[0].startswith("n")
    for errors in errors_of_a_step(model, batch, found, program):
        assert max(errors.values()) < EXACT


def test_microbatches_split_a_loss_that_has_a_rule() -> None:
    model, batch = Classes(), {"x": torch.randn(8, 4), "labels": torch.zeros(8, dtype=torch.int64)}
    cluster = resolve_cluster("local-cpu", 2)
    split = MicrobatchGraphs(capture(model, batch, rules=[LOSS]).graph, cluster, 8).graph(2)
    (region,) = split.regions
    (loss,) = (op for op in region.graph.ops if "LinearLoss" in op.target)
    assert region.graph.values[loss.operands[0]].shape == (4, 4)
    with pytest.raises(OptionError, match="cannot be split into microbatches: .*LinearLoss"):
        MicrobatchGraphs(capture(model, batch).graph, cluster, 8).graph(2)


class Classes(nn.Module):
    """A linear layer, and a loss that is a sum over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return LinearLoss.apply(self.body(x), self.head, labels, "sum")  # type: ignore[no-any-return]


def test_costs_are_as_the_rule_says_on_local_shapes() -> None:
    """Twice the flops of the forward in the backward; half of all on each of two ranks."""
    graph, k = the_op(ruled()[2], "LinearLoss")
    cluster = resolve_cluster("local-cpu", 2)
    costs = CostModel(cluster, build_mesh(cluster, 2, 1))
    rules = {rules[0].name: rules for rules in zip(*region_rules(graph, (2,))[k], strict=True)}
    whole = op_time(graph, graph.ops[k], rules["I"], costs)
    shared = op_time(graph, graph.ops[k], rules["n"], costs)
    flops = 6 * 32 * 8 * 12
    moved = sum(graph.values[v].num_bytes for v in (*graph.ops[k].operands, *graph.ops[k].outputs))
    assert whole.forward_s == costs.compute_s(flops, moved, "float64")
    assert shared.forward_s < whole.forward_s and shared.backward_s < whole.backward_s


def test_saved_bytes_are_as_the_rule_says() -> None:
    graph, k = the_op(ruled()[2], "LinearLoss")
    op = graph.ops[k]
    specs = tuple(
        dense_spec(graph.values[v].shape, graph.values[v].dtype, graph.values[v].requires_grad)
        for v in op.operands
    )
    key = ProbeKey(op.target, (Ref(0), Ref(1), Ref(2), "sum"), (), specs, op.custom)
    prober = OpProber()
    assert prober(key).saved_bytes == 8 * (32 * 8 + 12 * 8) == prober(unruled(key)).saved_bytes
    assert prober(key).saved_operands == ()


def unruled(key: ProbeKey) -> ProbeKey:
    """The same call without a rule: what it saves is found by running it."""
    assert key.custom is not None
    costs = replace(key.custom.costs, saved_bytes=None)
    return replace(key, custom=replace(key.custom, costs=costs))


def test_what_a_function_puts_on_its_context_is_counted() -> None:
    found = ruled()[2]
    graph, k = the_op(found, "RmsNorm")
    op = graph.ops[k]
    specs = (dense_spec((4, 8), "float32", True), dense_spec((8,), "float32", True))
    answer = OpProber()(ProbeKey(op.target, (Ref(0), Ref(1), 1e-6), (), specs, op.custom))
    assert answer.saved_operands == (0, 1)
    assert answer.saved_bytes == 4 * 4  # a statistic per row


@pytest.mark.parametrize(
    ("equation", "reduction", "text"),
    [
        ("n _, _ _, n ->", "mean", "is wrong: result 0 is another where ranks share n"),
        ("n k, _ k, n ->", "sum", "is wrong: result 0 is another where ranks share k"),
        ("n _, _ _, n -> n", "sum", "does not fit a call on "),
        ("n _, n _, n ->", "sum", "does not fit a call on "),
    ],
)
def test_a_wrong_rule_is_refused_by_name(equation: str, reduction: str, text: str) -> None:
    model, batch = function_model(1, reduction)
    rule = meshfold.register_rule(LinearLoss, equation)
    with pytest.raises(OptionError, match=f"rule support.models.functions:LinearLoss: .*{text}"):
        capture(model, batch, rules=[rule])


def test_a_rule_whose_gradients_are_wrong_is_refused() -> None:
    """The forward alone would agree."""

    class Half(Gelu):
        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient - gradient.mean()

    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    with pytest.raises(OptionError, match="the gradient of operand 0 is another where ranks share"):
        meshfold.register_rule(Half, "a b -> a b", example=(x,))


def test_a_plan_made_with_a_rule_is_for_the_model_with_that_rule() -> None:
    model, batch, _ = ruled()
    options = meshfold.CompileOptions(custom_rules=(LOSS,), pins={"dp": 2})
    plan = meshfold.find_plan(model, "local-cpux2", batch, options=options)
    compiled = meshfold.compile(model, "local-cpux2", batch, plan=plan, options=options)
    assert any("its rule 'n _, _ _, n ->', ranks may share n; checked" in n for n in plan.notes)
    assert "LinearLoss" in compiled.program.text(0)
    with pytest.raises(PlanMismatchError, match="made for another model"):
        meshfold.compile(model, "local-cpux2", batch, plan=plan)


class Model(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.weight).sum()


class Launched(Function):
    """Stands for a kernel that has no form for tensors without storage."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() == 0:
            raise RuntimeError("no storage")
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def test_a_rule_says_what_cannot_be_run_without_storage() -> None:
    rule = meshfold.register_rule(Launched, "a b -> a b", fake=lambda x: torch.empty_like(x))
    model = Model(lambda y: Launched.apply(y).sum()).double()
    batch = {"x": torch.randn(4, 4, dtype=torch.float64)}
    with pytest.raises(CaptureError, match="Launched .* say what it returns, with .*fake="):
        capture(model, batch)
    found = capture(model, batch, rules=[rule])
    program = emit_uniform(found, UniformStrategy(dp=2), 4)
    for errors in errors_of_a_step(model, batch, found, program):
        assert max(errors.values()) < EXACT
    graph, k = the_op(found, "Launched")
    key = ProbeKey(
        graph.ops[k].target,
        (Ref(0),),
        (),
        (dense_spec((4, 4), "float32", True),),
        graph.ops[k].custom,
    )
    assert OpProber()(key).fresh_gradient_bytes == (64,)


@pytest.mark.parametrize(
    "strategy",
    [UniformStrategy(dp=4), UniformStrategy(tp=2), UniformStrategy(dp=2, zero=3)],
    ids=lambda s: s.label,
)
def test_an_op_of_torch_library_is_shared_as_probes_show(strategy: UniformStrategy) -> None:
    model, batch = swishing_model()
    found = capture(model, batch)
    graph, k = the_op(found, "swish")
    assert graph.ops[k].custom and graph.ops[k].custom.operands[1] == ("d2",)
    program = emit_uniform(found, strategy, 8)
    for errors in errors_of_a_step(model, batch, found, program):
        assert max(errors.values()) < EXACT
