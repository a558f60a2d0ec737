"""Narrow precisions: what is cast, what is kept wide, and gradients of what is kept."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.models.hugging_face import tiny_model
from support.programs.local_programs import (
    emit_uniform,
    gradients,
    local_part,
    on_ranks,
    stack_model,
)
from torch import Tensor, nn
from torch.func import functional_call

import meshfold
from meshfold.capture.pipeline import Captured, capture
from meshfold.errors import OptionError
from meshfold.ir.op_graph import FoldedGraph, SlotKind, SourceKind, Value
from meshfold.ir.options import COMPUTE_DTYPES, CompileOptions, Precision
from meshfold.ir.strategy import UniformStrategy
from meshfold.torch_compat.dtypes import torch_dtype
from meshfold.validation.float64_mode import float64_everywhere

WIDE = [
    UniformStrategy(dp=2),
    UniformStrategy(dp=2, zero=3),
    UniformStrategy(tp=2),
    UniformStrategy(dp=2, tp=2, zero=3),
    UniformStrategy(dp=2, tp=2, sequence_parallel=True),
]


def kept_in_float32(captured: Captured) -> Captured:
    """A float64 program that casts to float64 what is kept in float32: so no rounding of the
    compute hides a wrong reduction."""

    def kept(value: Value) -> Value:
        return replace(value, master="float32")

    def change(graph: Any) -> Any:
        parameters = [slot.kind is SlotKind.PARAMETER for slot in graph.slots]
        values = [
            kept(v) if k < len(parameters) and parameters[k] else v
            for k, v in enumerate(graph.values)
        ]
        return replace(graph, values=tuple(values))

    folded: FoldedGraph = captured.graph
    regions = tuple(replace(r, graph=change(r.graph)) for r in folded.regions)
    parameters = tuple(replace(p, dtype="float32") for p in folded.parameters)
    return replace(captured, graph=replace(folded, regions=regions, parameters=parameters))


@pytest.mark.parametrize("reduce_bucket_bytes", [0, 1 << 40], ids=["one by one", "merged"])
@pytest.mark.parametrize("strategy", WIDE, ids=lambda s: s.label)
def test_gradients_are_reduced_in_the_stored_dtype(
    strategy: UniformStrategy, reduce_bucket_bytes: int
) -> None:
    model, batch = stack_model()
    for parameter in model.parameters():
        parameter.data = parameter.data.float().double()
    captured = kept_in_float32(capture(model, batch))
    program = replace(emit_uniform(captured, strategy, 4), reduce_bucket_bytes=reduce_bucket_bytes)
    expected = gradients(model, batch)

    def errors(rank: Any) -> float:
        rank.loss(batch).backward()
        worst = 0.0
        for name, parameter in rank.parameters.items():
            assert parameter.grad.dtype == torch.float32
            mine = local_part(program, name, expected[name], rank.mesh)
            error = (parameter.grad - mine).abs().max() / expected[name].abs().max()
            worst = max(worst, float(error))
        return worst

    assert max(on_ranks(model, captured, program, errors)) < 3e-7


Gradients = dict[str, Tensor]


def step_on_casts(
    model: nn.Module, batch: dict[str, Any], captured: Captured, wide: torch.dtype | None = None
) -> tuple[Tensor, Gradients]:
    """Loss and gradients of the unmodified model on casts of its parameters, which it reads in
    their own dtypes, or as numbers of `wide`."""
    dtypes = {
        source.name: torch_dtype(value.dtype)
        for instance in captured.graph.instances
        for source, value in zip(
            instance.sources, captured.graph.regions[instance.region].graph.values, strict=False
        )
        if source.kind is SourceKind.PARAMETER
    }
    leaves = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    casts = {n: p.to(dtypes.get(n, p.dtype)) for n, p in leaves.items()}
    if wide is not None:
        casts = {n: p.to(wide) for n, p in casts.items()}
    loss = functional_call(model, casts, kwargs=batch).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in leaves.items() if p.grad is not None}


def rounding_of(gradients: Gradients, exact: Gradients) -> float:
    """Relative error of gradients, its square in the mean over the parameters."""
    errors = [float((gradients[n] - g).norm() / g.norm()) ** 2 for n, g in exact.items()]
    return (sum(errors) / len(errors)) ** 0.5


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("family", ["llama", "gpt2", pytest.param("t5", marks=pytest.mark.slow)])
def test_one_device_rounds_as_the_casts_do(family: str, precision: Precision) -> None:
    """Norms, GELU and the loss are one op each, which rounds once where the model rounds every
    step: numbers differ, and are as near to those that nobody rounds."""
    model, batch = tiny_model(family)
    model.float()
    options = CompileOptions(precision=precision)
    compiled = meshfold.compile(model, "local-cpux1", batch, options=options)
    captured = compiled._form.captured
    expected, theirs = step_on_casts(model, batch, captured)
    with float64_everywhere():
        exact_loss, exact = step_on_casts(model.double(), batch, captured, torch.float64)
    model.float()
    loss = compiled(**batch)
    loss.backward()
    epsilon = torch.finfo(torch_dtype(COMPUTE_DTYPES[precision])).eps
    assert abs(loss.detach() - exact_loss) <= 2 * abs(expected - exact_loss) + epsilon / 16
    ours = {}
    for name, parameter in compiled.named_parameters():
        assert parameter.dtype == torch.float32 and parameter.grad is not None
        ours[name] = parameter.grad
    assert ours.keys() == exact.keys()
    assert rounding_of(ours, exact) <= 2 * rounding_of(theirs, exact)


class Mixed(nn.Module):
    """A frozen layer, a trained one, a batch norm and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.trained = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.trained(self.frozen(x)))
        return (y * self.scale).float().square().mean()


def dtypes_of(model: nn.Module, precision: Precision) -> dict[str, str]:
    captured = capture(model, {"x": torch.zeros(4, 4)}, precision=precision)
    kept = {p.name: p.dtype for p in captured.graph.parameters}
    kept.update({b.name: b.dtype for b in captured.graph.buffers})
    kept.update({i.name: i.dtype for i in captured.graph.inputs})
    return kept


def test_what_is_cast_and_what_is_not() -> None:
    kept = dtypes_of(Mixed(), "bf16")
    assert kept["x"] == "bfloat16"
    assert kept["frozen.weight"] == kept["frozen.bias"] == "bfloat16"
    assert kept["trained.weight"] == "float32"
    assert kept["norm.weight"] == kept["norm.running_mean"] == kept["scale"] == "float32"
    graph = capture(Mixed(), {"x": torch.zeros(4, 4)}, precision="bf16").graph.regions[0].graph
    read = {s.name: (v.dtype, v.master) for s, v in zip(graph.slots, graph.values, strict=False)}
    assert read["trained.weight"] == ("bfloat16", "float32")
    assert read["frozen.weight"] == ("bfloat16", "")
    assert read["norm.weight"] == ("float32", "")


def test_a_bf16_model_gets_float32_master_weights() -> None:
    kept = dtypes_of(Mixed().bfloat16(), "bf16")
    assert kept["trained.weight"] == kept["norm.weight"] == "float32"
    graph = capture(Mixed().bfloat16(), {"x": torch.zeros(4, 4)}, precision="bf16").graph
    region = graph.regions[0].graph
    read = {s.name: (v.dtype, v.master) for s, v in zip(region.slots, region.values, strict=False)}
    assert read["norm.weight"] == ("float32", "")


def test_what_a_model_keeps_wide_stays_wide() -> None:
    class Picky(Mixed):
        _keep_in_fp32_modules = ("trained",)

        def forward(self, x: Tensor) -> Tensor:
            return self.trained(self.frozen(x).float()).square().mean()

    for precision, dtype in (("fp16", "float32"), ("bf16", "bfloat16")):
        graph = capture(Picky(), {"x": torch.zeros(4, 4)}, precision=precision).graph  # type: ignore[arg-type]
        region = graph.regions[0].graph
        read = {s.name: v.dtype for s, v in zip(region.slots, region.values, strict=False)}
        assert read["trained.weight"] == dtype


def test_float64_is_left_alone() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).square().mean()

    assert dtypes_of(Plain().double(), "bf16")["linear.weight"] == "float64"


def test_batches_of_any_float_dtype_are_taken() -> None:
    model = Mixed()
    x = torch.randn(4, 4)
    options = CompileOptions(precision="bf16")
    compiled = meshfold.compile(model, "local-cpux1", {"x": x}, options=options)
    assert torch.equal(compiled(x=x), compiled(x=x.bfloat16()))
    with pytest.raises(OptionError, match="x has dtype int64"):
        compiled(x=x.long())


def test_a_plan_carries_its_precision() -> None:
    model, batch = Mixed(), {"x": torch.zeros(4, 4)}
    options = CompileOptions(precision="bf16")
    plan = meshfold.find_plan(model, "local-cpux1", batch, options=options)
    assert plan.precision == "bf16"
    compiled = meshfold.compile(model, "local-cpux1", batch, plan=plan)
    assert {i.dtype for i in compiled.program.folded.inputs} == {"bfloat16"}


def test_another_precision_is_refused() -> None:
    with pytest.raises(OptionError, match="'int4' is unknown; write auto, model, bf16 or fp16"):
        CompileOptions(precision="int4")  # type: ignore[arg-type]
