"""Does a plan compute what the model computes? Local processes against the model in one process.

    captured, as planned --exact--> float64, no dropout --emit with the plan--> gloo processes
    the unmodified model in float64, dropout off ----------------------------> one process

Every process runs both on the same batch and compares the loss and its shard of every gradient,
then of every parameter after some steps of the plan's optimizer (meshfold.validation.report).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshfold.api import bind
from meshfold.capture.library_modules.hugging_face import run_experts_as
from meshfold.capture.pipeline import Captured
from meshfold.capture.trace.loss_function import call_model
from meshfold.capture.trace.returned import named_total
from meshfold.distributed.local_processes import Report, run_local
from meshfold.errors import MeshfoldError
from meshfold.ir.node_groups import node_levels
from meshfold.ir.plan import Plan, model_inputs
from meshfold.ir.strategy import KeptResults
from meshfold.models.config_file import Configuration
from meshfold.models.from_argument import BuiltModel, build_for_plan, is_configuration
from meshfold.passes.fold.assemble import fingerprint
from meshfold.passes.graph.without_dropout import exact
from meshfold.passes.split.microbatch import has_own_statistics
from meshfold.plan_file.io import plan_from_json, plan_to_json
from meshfold.sharding.layout import shard_of
from meshfold.torch_compat.pytree import flat, map_leaves
from meshfold.training.compiled_model import CompiledModel
from meshfold.training.shards.local_shard import local_tensor
from meshfold.validation.alike_draws import without_dropout
from meshfold.validation.captured import captured_alike, captured_as_planned, rounded_alike
from meshfold.validation.captured_alone import capture_difference, captured_step
from meshfold.validation.collective_order import (
    StartedCollective,
    collective_mismatch,
    collectives_of,
)
from meshfold.validation.compared_outputs import loss_in, output_sizes, wide_loss
from meshfold.validation.first_divergence import first_divergence
from meshfold.validation.float64_mode import float64_everywhere, in_float64
from meshfold.validation.python_state import python_state_kept
from meshfold.validation.report import (
    NUM_STEPS,
    TOLERANCE,
    Sizes,
    VerifyReport,
    badness,
    differences,
)
from meshfold.validation.rounding import (
    MORE_SAMPLES,
    SAMPLES,
    Rounding,
    rounding_of,
    state_of,
)
from meshfold.validation.scaled_down import needs_scaling_down, scaled_down

EPS = 1e-5
"""AdamW's: a gradient that is zero but for rounding moves its parameter by rounding / EPS."""
LEARNING_RATE = 1e-2
OPTIMIZER_NAMES = {"adamw_fused": "fused AdamW", "momentum": "SGD with momentum", "sgd": "SGD"}


def verify(plan: Plan, model_argument: str) -> VerifyReport:
    """Runs the comparison. `model_argument` is the MODEL of the command line.

    A plan for more than this machine takes is verified on a scaled-down model
    (meshfold.validation.scaled_down), which the report says.

    Raises PlanMismatchError if the plan is for another model, MeshfoldError if it cannot be scaled
    down or does not mean what one process does, LocalProcessError if a process fails.
    """
    if has_own_statistics(plan.pins) and plan.strategy.microbatches > 1:
        raise MeshfoldError(
            "verify compares with one process that runs the batch as a whole, and under "
            "batch_norm=microbatch each microbatch has statistics of its own; verify the plan with "
            "microbatches=1, or that of model.eval()"
        )
    built = build_for_plan(model_argument, plan)
    captured = captured_as_planned(plan, built)
    if not is_configuration(model_argument) and any(p.is_meta for p in built.model.parameters()):
        raise MeshfoldError(
            f"{model_argument}: the model is on the meta device, and verify runs it; "
            "let the factory build it on the CPU"
        )
    if not needs_scaling_down(plan):
        return _run(plan, model_argument)
    small = scaled_down(plan, model_argument, captured)
    return replace(_run(small.plan, small.model), shrunk=small.changes)


def _run(plan: Plan, model: str | Configuration) -> VerifyReport:
    results = run_local(plan.world_size, _compare, plan_to_json(plan), model, quiet=True)
    return _report(plan, results)


@dataclass(frozen=True)
class _Compared:
    """What one process found."""

    eager_loss: float
    loss: float
    gradients: Sizes
    parameters: Sizes
    collectives: tuple[StartedCollective, ...]
    first_divergence: str = ""
    rounding: Rounding = Rounding()
    """Known where they differ."""
    outputs: Sizes = field(default_factory=dict)


def _compare(_: Report, plan_text: str, model: str | Configuration) -> _Compared:
    plan = plan_from_json(plan_text)
    built = build_for_plan(model, plan, device="cpu")
    return compare_on_this_rank(plan, captured_as_planned(plan, built), built)


def compare_on_this_rank(plan: Plan, captured: Captured, built: BuiltModel) -> _Compared:
    """Runs the plan and the model itself. Every rank of the default process group calls it;
    `_report` takes what they return. The model of `built` becomes float64 and is trained."""
    built = replace(
        built,
        model=in_float64(built.model),
        example_inputs=_double(built.example_inputs),
        loss_fn=wide_loss(built.loss_fn),
    )
    # A factory that ran its model leaves gradients, which the compiled model does not begin with.
    built.model.zero_grad()
    _take_from_first_rank(built)
    compared, blamed = _compared_as_captured(plan, _exact(captured), built)
    if blamed:
        with float64_everywhere():
            wide = _exact(captured_alike(plan, built))
        if rounded_alike(wide, _exact(captured)):
            compared, blamed = _compared_as_captured(plan, wide, built)
    return replace(compared, first_divergence=blamed) if blamed else compared


def _compared_as_captured(
    plan: Plan, captured: Captured, built: BuiltModel
) -> tuple[_Compared, str]:
    """captured: in float64. And what the captured program does otherwise than the model, if that is
    why they differ."""
    output = captured.graph.outputs[0].name
    compiled = _bound(plan, built, captured)
    assert compiled.rank_mesh is not None
    with float64_everywhere(), without_dropout():
        outputs = output_sizes(built, captured, compiled)
    initial = state_of(built.model)
    with collectives_of(compiled.rank_mesh) as calls:
        eager_loss, loss = _eager_step(built, output), _compiled_step(compiled, built, captured)
    _zeros_for_none(built.model, compiled)
    gradients = _sizes(compiled, built.model, _gradient)
    optimizers = [_optimizer(plan, m) for m in (built.model, compiled)]
    for step in range(NUM_STEPS):
        if step:
            _eager_step(built, output)
            _compiled_step(compiled, built, captured)
            _zeros_for_none(built.model, compiled)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    parameters = _sizes(compiled, built.model, lambda p: local_tensor(p.detach()))
    losses = eager_loss.sum().item(), loss.sum().item()
    compared = _Compared(*losses, gradients, parameters, tuple(calls), outputs=outputs)
    if _together(plan, compared).passed:
        return compared, ""
    compared, passed = _with_rounding(compared, plan, built, output, initial)
    if passed:
        return compared, ""
    if blamed := _capture_difference(built, captured, output):
        return compared, blamed
    # The first divergence is found along a forward pass, which a pipeline has none of.
    if plan.schedule:
        return compared, ""
    return replace(compared, first_divergence=_first_divergence(plan, built, captured)), ""


def _bound(plan: Plan, built: BuiltModel, captured: Captured) -> CompiledModel:
    planned = _planned_for(plan, captured)
    return bind(built.model, planned, captured, built.example_inputs, loss_fn=built.loss_fn)


def _together(plan: Plan, compared: _Compared) -> VerifyReport:
    """What all ranks found; called on all of them."""
    everyone: list[_Compared] = [compared] * plan.world_size
    dist.all_gather_object(everyone, compared)
    return _report(plan, everyone)


def _with_rounding(
    compared: _Compared,
    plan: Plan,
    built: BuiltModel,
    output: str,
    initial: Mapping[str, Tensor],
) -> tuple[_Compared, bool]:
    """`compared` with what rounding does, of as many samples as it takes to pass, and whether it
    passes."""
    for num_samples in (SAMPLES, MORE_SAMPLES):
        rounding = _rounding(plan, built, output, initial, num_samples)
        compared = replace(compared, rounding=rounding)
        report = _together(plan, compared)
        if report.passed or not report.only_parameters_differ:
            break
    return compared, report.passed


def _rounding(
    plan: Plan, built: BuiltModel, output: str, initial: Mapping[str, Tensor], num_samples: int
) -> Rounding:
    """What rounding does to the model in one process over the steps that are compared."""
    model = built.model

    def train(scale: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        gradients: dict[str, Tensor] = {}
        optimizer = _optimizer(plan, model)
        for _ in range(NUM_STEPS):
            _eager_step(built, output, scale)
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    parameter.grad /= scale
                gradients.setdefault(name, _gradient(parameter).clone())
            optimizer.step()
            optimizer.zero_grad()
        return gradients, {name: p.detach().clone() for name, p in model.named_parameters()}

    return rounding_of(model, initial, train, num_samples)


def _capture_difference(built: BuiltModel, captured: Captured, output: str) -> str:
    """What the captured program alone does otherwise than the model, "" if nothing: the same text
    on all ranks."""
    parameters = dict(built.model.named_parameters())
    buffers, batch = dict(built.model.named_buffers()), built.example_inputs
    with float64_everywhere(), without_dropout():
        found = captured_step(captured.graph, captured.constants, parameters, buffers, batch)
    built.model.zero_grad()
    loss = _eager_step(built, output)
    right = {name: parameter.grad for name, parameter in parameters.items()}
    built.model.zero_grad()
    text: list[str] = [capture_difference(found, (loss, right), TOLERANCE)]
    dist.broadcast_object_list(text, src=0)
    return text[0]


def _first_divergence(plan: Plan, built: BuiltModel, captured: Captured) -> str:
    """The op behind the difference, in programs without recomputation."""
    typings = [replace(r.typing, recompute="none", kept=KeptResults()) for r in plan.regions]
    regions = [replace(r, typing=t) for r, t in zip(plan.regions, typings, strict=True)]
    saving = replace(_planned_for(plan, captured), regions=tuple(regions))
    with float64_everywhere(), without_dropout():
        return first_divergence(
            bind(built.model, saving, captured, built.example_inputs, loss_fn=built.loss_fn),
            captured.constants,
            dict(built.model.named_parameters()),
            dict(built.model.named_buffers()),
            built.example_inputs,
            TOLERANCE,
        )


def _compiled_step(compiled: CompiledModel, built: BuiltModel, captured: Captured) -> Tensor:
    """Forward and backward of the emitted program; gradients are left in `.grad`."""
    # The graph names the dtype of most new tensors, not of those that had the default one.
    with float64_everywhere():
        if compiled.plan.schedule:
            returned = compiled.train_step(built.example_inputs)
            return loss_in(captured, returned)
        loss = loss_in(captured, compiled(**built.example_inputs))
        torch.autograd.backward(loss.sum())
    return loss.detach()


def _optimizer(plan: Plan, model: nn.Module) -> torch.optim.Optimizer:
    """The plan's, or AdamW for one that rounds; with settings under which rounding stays small."""
    # A stage may be without parameters, and torch makes no optimizer of none.
    parameters = list(model.parameters()) or [nn.Parameter(torch.zeros(()))]
    if plan.optimizer in ("sgd", "momentum"):
        momentum = 0.9 * (plan.optimizer == "momentum")
        return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=momentum)
    is_fused = plan.optimizer == "adamw_fused" or None
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, eps=EPS, fused=is_fused)


def _sizes(
    compiled: CompiledModel, model: nn.Module, tensor_of: Callable[[nn.Parameter], Tensor]
) -> Sizes:
    """Sizes of `tensor_of` every parameter, and of its difference between model and this rank."""
    assert compiled.rank_mesh is not None
    unsharded, local = dict(model.named_parameters()), dict(compiled.named_parameters())
    sizes, coords = compiled.program.mesh.sizes, compiled.rank_mesh.coords
    found = {}
    for name, layout in compiled.program.stored.items():
        if name not in local:
            continue
        right = tensor_of(unsharded[name])
        expected = shard_of(right, layout, sizes, coords)
        found[name] = (_largest(right), _largest(tensor_of(local[name]) - expected))
    return found


def _take_from_first_rank(built: BuiltModel) -> None:
    """A factory may draw from generators that nobody seeded: all ranks use rank 0's numbers."""
    leaves, _ = flat(dict(built.example_inputs))
    inputs = (leaf for leaf in leaves if isinstance(leaf, Tensor))
    with torch.no_grad():
        for tensor in (*built.model.parameters(), *built.model.buffers(), *inputs):
            value = tensor.contiguous()
            dist.broadcast(value, src=0)
            tensor.copy_(value)


def _exact(captured: Captured) -> Captured:
    constants = {name: _wide(value) for name, value in captured.constants.items()}
    return replace(captured, graph=exact(captured.graph), constants=constants)


def _planned_for(plan: Plan, captured: Captured) -> Plan:
    """`plan` as if it were for the exact program, whose typing is the same."""
    graph, inputs = captured.graph, model_inputs(captured.graph)
    return replace(plan, model=replace(plan.model, fingerprint=fingerprint(graph), inputs=inputs))


def _double(inputs: Mapping[str, Any]) -> dict[str, Any]:
    doubled: dict[str, Any] = map_leaves(
        lambda x: _wide(x) if isinstance(x, Tensor) else x, dict(inputs)
    )
    return doubled


def _wide(value: Tensor) -> Tensor:
    """A copy, in float64 if a float, in complex128 if a complex number."""
    wide = torch.complex128 if value.is_complex() else torch.float64
    dtype = wide if value.is_complex() or value.is_floating_point() else value.dtype
    return value.detach().to(dtype, copy=True).requires_grad_(value.requires_grad)


def _eager_step(built: BuiltModel, output: str, scale: float = 1.0) -> Tensor:
    """Forward and backward of the model itself; gradients, times `scale`, are left in `.grad`."""
    # What Hugging Face runs experts with by itself, grouped_mm, has no float64 kernel; a loop over
    # them means the same.
    run_experts_as(built.model, "eager")
    with float64_everywhere(), without_dropout(), python_state_kept(built.model):
        value = named_total(output, call_model(built.model, built.example_inputs, built.loss_fn))
        torch.autograd.backward(value.sum() * scale)
    return value.detach()


def _zeros_for_none(model: nn.Module, compiled: nn.Module) -> None:
    """Gradients of zeros where a model by itself leaves None and its graph does not, as of an
    expert that no row chose: AdamW decays the one and skips the other."""
    local = dict(compiled.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.grad is None and name in local and local[name].grad is not None:
            parameter.grad = torch.zeros_like(parameter)


def _gradient(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    return local_tensor(torch.zeros_like(parameter) if gradient is None else gradient)


def _largest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def _report(plan: Plan, results: Sequence[_Compared]) -> VerifyReport:
    """What `compare_on_this_rank` found on all ranks, in their order."""
    first = results[0]
    bound = abs(first.eager_loss) if math.isfinite(first.eager_loss) else 0.0
    return VerifyReport(
        world_size=plan.world_size,
        strategy=plan.strategy.label,
        eager_loss=first.eager_loss,
        loss=max((r.loss for r in results), key=lambda x: badness(x - first.eager_loss)),
        outputs=differences([r.outputs for r in results]),
        gradients=differences([r.gradients for r in results], first.rounding.gradients, bound),
        parameters=differences([r.parameters for r in results], first.rounding.parameters, bound),
        optimizer=OPTIMIZER_NAMES.get(plan.optimizer, "AdamW"),
        first_divergence=first.first_divergence,
        num_collectives=len(first.collectives),
        collective_mismatch=collective_mismatch(
            node_levels(plan.cluster, plan.mesh), [r.collectives for r in results]
        ),
    )
