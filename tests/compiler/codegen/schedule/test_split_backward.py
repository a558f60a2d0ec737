"""The backward in two parts: what B leaves, what W makes of it."""

from dataclasses import replace

import pytest
import torch
from support.programs.pipeline import captured_model, planned, recut
from torch import Tensor, fx, nn
from torch.autograd.graph import get_gradient_edge

import meshfold
from meshfold.api import bind
from meshfold.capture.pipeline import capture
from meshfold.codegen.emit.pipeline import EmittedPipeline, emit_plan
from meshfold.codegen.program.emitted import PLACE
from meshfold.codegen.schedule import split_backward as weight_gradients
from meshfold.cost_models.pipeline.schedules import Schedule, ScheduleKind
from meshfold.distributed.deferred_weight_grads import DeferredWeightGrads
from meshfold.distributed.rank_mesh import single_mesh
from meshfold.distributed.step_context import StepContext
from meshfold.ir.mesh import Mesh
from meshfold.ir.op_graph import Dependence, Op, OpGraph, Ref, Slot, SlotKind, Value
from meshfold.ir.options import CompileOptions
from meshfold.ops.expert_linear import expert_linear
from meshfold.passes.price.weight_gradients import SPLIT


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=dtype)


@pytest.mark.parametrize("op", ["linear", "addmm", "mm"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("sizes", [(4, 3), (0, 3), (4, 0)])
def test_w_makes_what_b_left(op: str, dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    n, k = sizes
    work = DeferredWeightGrads()
    context = StepContext(single_mesh(Mesh(()), torch.device("cpu")), deferred=work)
    x = draw(6, n, dtype=dtype).requires_grad_()
    weight = nn.Parameter(draw(k, n, dtype=dtype) if op == "linear" else draw(n, k, dtype=dtype))
    bias = nn.Parameter(draw(k, dtype=dtype))
    w, b = work.tap(weight), work.tap(bias)
    # Read twice, once through a view.
    if op == "linear":
        y = weight_gradients.linear(context, x, w, b) * 2 + weight_gradients.mm(context, x, w.t())
        expected = torch.nn.functional.linear(x, weight, bias) * 2 + x @ weight.t()
    elif op == "addmm":
        y = weight_gradients.addmm(context, b, x, w) * 2 + weight_gradients.linear(
            context, x, w.t()
        )
        expected = torch.addmm(bias, x, weight) * 2 + x @ weight
    else:
        y, expected = weight_gradients.mm(context, x, w) + b, x @ weight + bias
    assert torch.allclose(y, expected, rtol=1e-14)
    gradients = torch.autograd.grad(expected.abs().square().sum(), (x, weight, bias))
    y.abs().square().sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, gradients[0], rtol=1e-13)
    assert weight.grad is None and bias.grad is None
    work.run()
    for parameter, gradient in zip((weight, bias), gradients[1:], strict=True):
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, gradient, rtol=1e-13)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_w_makes_the_weights_of_experts(transposed: bool, has_bias: bool) -> None:
    """Some rows belong to no expert, one expert has none."""
    work = DeferredWeightGrads()
    context = StepContext(single_mesh(Mesh(()), torch.device("cpu")), deferred=work)
    ids = torch.tensor([3, 0, 0, 4, 2, 0])
    x = draw(6, 4).requires_grad_()
    weight = nn.Parameter(draw(4, 4, 3) if transposed else draw(4, 3, 4))
    bias = nn.Parameter(draw(4, 3)) if has_bias else None
    b = None if bias is None else work.tap(bias)
    y = weight_gradients.expert_linear(context, x, work.tap(weight), ids, b, transposed)
    expected = expert_linear(x, weight, ids, bias, transposed)
    assert torch.equal(y, expected)
    trained = (x, weight) if bias is None else (x, weight, bias)
    gradients = torch.autograd.grad(expected.square().sum(), trained)
    y.square().sum().backward()
    assert x.grad is not None and torch.equal(x.grad, gradients[0])
    assert weight.grad is None
    work.run()
    for parameter, gradient in zip(trained, gradients, strict=True):
        assert parameter.grad is not None and torch.equal(parameter.grad, gradient)


@pytest.mark.parametrize("op", ["linear", "mm", "expert_linear"])
def test_what_comes_later_is_added_in_place(op: str) -> None:
    context = StepContext(single_mesh(Mesh(()), torch.device("cpu")))
    weight = nn.Parameter(draw(2, 3, 4) if op == "expert_linear" else draw(3, 4))
    ids = torch.tensor([0, 2, 0, 0, 1])  # one of nobody
    given = {
        "linear": lambda x, w: (x, w),
        "mm": lambda x, w: (x, w.t()),
        "expert_linear": lambda x, w: (x, w, ids),
    }[op]
    total: Tensor | None = None
    expected = torch.zeros_like(weight)
    for _ in range(3):
        work = DeferredWeightGrads()
        x = draw(5, 4).requires_grad_()
        place = weight.view_as(weight)
        edge = get_gradient_edge(place)
        y = getattr(weight_gradients, op)(replace(context, deferred=work), *given(x, place))
        gradient = torch.ones_like(y)
        torch.autograd.grad(y, [x], [gradient])
        (made,) = work.gradients([edge], [total])
        assert made is not None and not made.requires_grad
        assert total is None or made is total
        total = made
        again = getattr(weight_gradients, op)(context, *given(x, weight))
        expected += torch.autograd.grad(again, [weight], [gradient])[0]
    assert total is not None and torch.allclose(total, expected, rtol=1e-13)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()).float().square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_under_autocast_both_parts_work_in_its_dtype(dtype: torch.dtype) -> None:
    """What the full backward gives, to the last bit of what is added up."""
    model, batch = Layers().to(dtype), {"x": draw(8, 8).to(dtype)}
    captured = capture(model, batch)
    options = CompileOptions(pins={"microbatches": 4, "recompute": "none"})
    base = meshfold.compile(model, "local-cpux1", batch, options=options).plan
    found = []
    for kind in (ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZERO_BUBBLE):
        compiled = bind(model, recut(base, Schedule(kind, 1, 4)), captured, batch)
        with torch.autocast("cpu", torch.bfloat16):
            compiled.train_step(batch)
        found.append({name: p.grad for name, p in compiled.named_parameters()})
    for name, expected in found[0].items():
        gradient = found[1][name]
        assert expected is not None and gradient is not None and gradient.dtype == dtype
        assert expected.abs().max() > 0
        assert torch.allclose(gradient, expected, rtol=1e-6, atol=1e-9), name


def test_what_is_priced_as_split_can_be_split() -> None:
    assert weight_gradients._FUNCTIONS.keys() == SPLIT


@pytest.mark.parametrize(
    ("target", "is_weight"), [("aten.mul.Tensor", False), ("aten.t.default", True)]
)
def test_a_weight_is_a_parameter_or_a_view_of_one(target: str, is_weight: bool) -> None:
    """What another op computes keeps tensors that B lets go."""
    value = Value((4, 4), "float64", requires_grad=True, depends=Dependence.PARAMETER)
    slots = (Slot(SlotKind.PARAMETER, "w"), Slot(SlotKind.PARAMETER, "scale"))
    args = (Ref(0), Ref(1)) if target == "aten.mul.Tensor" else (Ref(0),)
    ops = OpGraph(slots, (value,) * 3, (Op(target, args, (), (2,)),), (2,))
    for v, expected in ((0, True), (2, is_weight)):
        node = fx.Graph().placeholder("weight")
        node.meta[PLACE] = (v, ())
        assert weight_gradients._is_weight(node, ops) == expected


def test_every_product_with_a_weight_is_split() -> None:
    pins = (("microbatches", 4), ("pp", 2), ("recompute", "none"))
    plan = recut(planned("gpt2", 2, 2, pins), Schedule(ScheduleKind.ZERO_BUBBLE, 2, 4))
    emitted = emit_plan(captured_model("gpt2", 2).graph, plan)
    assert isinstance(emitted, EmittedPipeline)
    nodes = [n for s in emitted.stages for r in s.regions for n in r.graph.graph.nodes]
    targets = [node.target for node in nodes]
    assert torch.ops.aten.addmm.default not in targets
    # Four in a block, which both stages have; the head reads the embedding.
    assert targets.count(weight_gradients.addmm) == 4 * 2
    assert targets.count(weight_gradients.linear) == 1
