"""The public calls: find_plan and compile.

model, example inputs --capture--> folded graph --search--> Plan --emit--> program
    --bind to the processes of this job--> CompiledModel
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshfold.capture.known_values.fixed_inputs import fixed_by
from meshfold.capture.pipeline import Captured, capture
from meshfold.capture.trace.loss_function import LossFunction
from meshfold.codegen.emit.pipeline import EmittedPipeline, emit_plan
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.distributed.agreement import compared
from meshfold.distributed.rank_mesh import RankMesh, process_mesh, single_mesh
from meshfold.errors import CaptureError, OptionError, PlanMismatchError
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import ModelInput, Plan, model_inputs
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.fold.assemble import fingerprint
from meshfold.passes.planner.assembly import PlanRequest
from meshfold.passes.planner.best_mesh import Progress
from meshfold.passes.planner.find import with_memory_note
from meshfold.passes.planner.shared_work import SharedWork
from meshfold.plan_file.io import load_plan
from meshfold.refine.fitting import fastest_that_fits
from meshfold.training.calls.agreement import NUM_COMPARED, agreed_states, states_text
from meshfold.training.calls.call_arguments import kind_text, named_inputs
from meshfold.training.compiled_model import CompiledModel

ExampleArguments = Mapping[str, Any] | Sequence[Any]
"""Arguments of one call of a model, by name or by position."""


def find_plan(
    model: nn.Module,
    cluster_spec: ClusterSpec | str,
    example_inputs: ExampleArguments,
    *,
    options: CompileOptions | None = None,
    loss_fn: LossFunction | None = None,
    progress: Progress | None = None,
    prices_memory: bool = False,
) -> Plan:
    """The fastest plan that fits. See `compile` for arguments and errors. prices_memory: a note of
    the plan says what it does to fit the budget and what each of it costs, which takes some more
    searches."""
    cluster = _resolve(cluster_spec)
    options = on_cluster(cluster, options or CompileOptions())
    captured = capture_model(model, named_inputs(model, example_inputs), options, loss_fn)
    name = type(model).__name__
    return plan_captured(
        captured, name, cluster, options, progress=progress, prices_memory=prices_memory
    )


def compile(
    model: nn.Module,
    cluster_spec: ClusterSpec | str,
    example_inputs: ExampleArguments,
    *,
    plan: Plan | str | os.PathLike[str] | None = None,
    options: CompileOptions | None = None,
    loss_fn: LossFunction | None = None,
    sync_module_states: bool = True,
    num_compared_batches: int | None = NUM_COMPARED,
) -> CompiledModel:
    """Turn `model` into a program that trains on `cluster_spec`.

    model: an unmodified module, in the mode (train or eval) it is to be captured in; on the meta
    device it is initialised shard by shard. cluster_spec: a ClusterSpec, or a preset: "dgx-h100x4".
    example_inputs: keyword arguments of one global batch, or a tuple in the order of the model's;
    only shapes and dtypes are read. loss_fn(outputs, ...): what computes the loss of what the model
    returns and of what else the batch has. options: without a precision, ops compute in bfloat16 on
    devices that are fast in it, whatever the dtype of the model (float64 stays), with weights,
    reductions of gradients and optimizer states in float32; else as the model is. plan: a plan or
    its file instead of a search. Planning needs no process group and no accelerator; with a process
    group (torchrun) the model is bound to it, otherwise the result is for inspection, unless the
    plan is for one device.

    sync_module_states: where initial values differ between ranks, take those of rank 0 and warn;
    else refuse. num_compared_batches: forward passes in which ranks that must hold the same rows
    compare them; None: all. 0: nor do they compare the parameters that they hold alike.

    Raises CaptureError, InfeasibleError, OptionError, ClusterSpecError, PlanFormatError, and
    PlanMismatchError if plan, model and processes do not belong together; RanksDifferError on all
    ranks if one of them raises, or has another program.
    """
    options = options or CompileOptions()
    inputs = named_inputs(model, example_inputs)

    def emitted() -> _Emitted:
        chosen = plan if plan is None or isinstance(plan, Plan) else load_plan(plan)
        if chosen is not None:
            given = _as_planned(options, chosen, inputs)
            return _emitted(model, chosen, capture_model(model, inputs, given, loss_fn))
        cluster = _resolve(cluster_spec)
        given = on_cluster(cluster, options)
        captured = capture_model(model, inputs, given, loss_fn)
        chosen = plan_captured(captured, type(model).__name__, cluster, given)
        return _emitted(model, chosen, captured)

    binding = Binding(sync_module_states, num_compared_batches, loss_fn)
    return _bound(model, emitted, inputs, binding)


def _as_planned(options: CompileOptions, plan: Plan, inputs: Mapping[str, Any]) -> CompileOptions:
    """The options of a plan that is given, for a model of these inputs. Raises PlanMismatchError
    for a loss or outputs that it does not have."""
    returns, asked = plan.model.returns, options.returns
    if asked.loss not in ((), returns.loss) or (asked.outputs and not returns.outputs):
        raise PlanMismatchError(
            f"the plan is for loss {plan.model.loss!r} and outputs {list(returns.outputs)}; plan "
            "again for other ones, or leave loss and outputs out"
        )
    return replace(
        options,
        precision=plan.precision,
        mode=plan.mode,
        loss=returns.loss,
        outputs=returns.outputs,
        sharded_outputs=returns.sharded,
        fixed_inputs=options.fixed_inputs or fixed_by(plan, inputs),
    )


def capture_model(
    model: nn.Module,
    inputs: Mapping[str, Any],
    options: CompileOptions,
    loss_fn: LossFunction | None,
) -> Captured:
    """What plan_captured plans. options: as of on_cluster. Raises CaptureError."""
    return capture(
        model,
        inputs,
        full_capture=options.full_capture,
        precision=options.captured_precision,
        returns=options.returns,
        loss_fn=loss_fn,
        rules=options.custom_rules,
        value_checks=options.value_checks,
        fixed_inputs=options.fixed_inputs,
    )


def plan_captured(
    captured: Captured,
    model_name: str,
    cluster_spec: ClusterSpec | str,
    options: CompileOptions,
    *,
    progress: Progress | None = None,
    probe: OpProber | None = None,
    shared: SharedWork | None = None,
    prices_memory: bool = False,
) -> Plan:
    """find_plan for a model that is captured already, in `options.captured_precision`. probe,
    shared: of earlier plans of the model, and of the same cluster and batch."""
    cluster = _resolve(cluster_spec)
    check_output(captured)
    options = with_checkpointing(options, captured)
    request = PlanRequest(
        captured.graph,
        cluster,
        options,
        model_name,
        batch_size_of(captured),
        probe or OpProber(),
        shared or SharedWork(),
        wants_rivals=True,
    )
    won = fastest_that_fits(request, progress)
    priced = with_memory_note(won.finalist, request, prices_memory=prices_memory)
    return replace(won.plan, notes=(*won.plan.notes, *priced.notes[len(won.finalist.notes) :]))


def with_checkpointing(options: CompileOptions, captured: Captured) -> CompileOptions:
    """`options` with recomputation pinned where the model asks for it and that is to be kept."""
    if not (options.keep_checkpointing and captured.checkpointed):
        return options
    return replace(options, pins={"recompute": "full", **options.pins})


def on_cluster(cluster: ClusterSpec, options: CompileOptions) -> CompileOptions:
    """`options` with the precision that they mean on a cluster."""
    return replace(options, precision=options.precision_on(cluster))


def _resolve(text: ClusterSpec | str) -> ClusterSpec:
    """What the text means; a preset without a count is as large as the job, if there is one."""
    if isinstance(text, ClusterSpec):
        return text
    if not isinstance(text, str):
        raise OptionError(f"the cluster is {kind_text(text)}; pass a ClusterSpec, a name or a path")
    has_count = text.endswith(".json") or "/" in text or re.search(r"x\d+$", text) is not None
    if has_count or not _is_in_job():
        return resolve_cluster(text)
    return resolve_cluster(text, dist.get_world_size())


def check_output(captured: Captured) -> None:
    """Raises CaptureError unless the first output of the program is the loss, or the only one."""
    if captured.no_loss:
        raise CaptureError(captured.no_loss)


def batch_size_of(captured: Captured) -> int:
    """The global batch. Raises OptionError where no input has a batch dim."""
    size = captured.graph.batch_size
    if not size:
        raise OptionError("no input has a batch dim; pass a batch of tensors as example_inputs")
    return size


@dataclass(frozen=True)
class _Emitted:
    """A model's plan and program, before there are processes."""

    plan: Plan
    captured: Captured
    program: EmittedProgram | EmittedPipeline
    states: str
    """Digest of the names, shapes and dtypes of parameters and buffers."""

    def facts(self) -> dict[str, str]:
        """What all ranks must have alike."""
        return {
            "program": self.program.digest,
            "seed in its plan": str(self.plan.seed),
            "set of parameters and buffers": self.states,
        }


@dataclass(frozen=True)
class Binding:
    """Arguments of `compile` for a model that is emitted."""

    sync_module_states: bool = True
    num_compared_batches: int | None = NUM_COMPARED
    loss_fn: LossFunction | None = None


def bind(
    model: nn.Module,
    plan: Plan,
    captured: Captured,
    example_inputs: Mapping[str, Any],
    *,
    loss_fn: LossFunction | None = None,
) -> CompiledModel:
    """Emit the program of `plan` and, with processes, initialise this rank's shards of the model.

    Arguments and errors as of `compile`.
    """

    work = partial(_emitted, model, plan, captured)
    return _bound(model, work, example_inputs, Binding(loss_fn=loss_fn))


def _emitted(model: nn.Module, plan: Plan, captured: Captured) -> _Emitted:
    """Raises PlanMismatchError, CaptureError."""
    check_output(captured)
    check_fingerprint(plan, captured)
    if _is_in_job() and dist.get_world_size() != plan.world_size:
        raise PlanMismatchError(
            f"the plan is for {plan.world_size} processes, this job has {dist.get_world_size()}; "
            "start as many as the plan has devices, or plan for this job"
        )
    return _Emitted(plan, captured, emit_plan(captured.graph, plan), states_text(model))


def _bound(
    model: nn.Module,
    work: Callable[[], _Emitted],
    example_inputs: Mapping[str, Any],
    binding: Binding,
) -> CompiledModel:
    """What `work` emits, once the ranks agree on it, on this rank's shards of the model."""
    emitted = compared(work, _Emitted.facts) if _is_in_job() else work()
    plan, program = emitted.plan, emitted.program
    if _is_in_job():
        agreed_states(model, sync=binding.sync_module_states)
    mesh = _rank_mesh(model, plan, program)
    return CompiledModel(
        model,
        plan,
        emitted.captured,
        program,
        mesh,
        example_inputs,
        binding.num_compared_batches,
        binding.loss_fn,
    )


def check_fingerprint(plan: Plan, captured: Captured) -> None:
    """Raises PlanMismatchError if the plan was made for another model or batch."""
    graph = captured.graph
    inputs = model_inputs(graph)
    if plan.model.inputs != inputs:
        raise PlanMismatchError(
            f"the plan is for {plan.model.name} with inputs {_inputs_text(plan.model.inputs)}, "
            f"these are {_inputs_text(inputs)}; plan again for this batch"
        )
    if plan.model.fingerprint != fingerprint(graph):
        raise PlanMismatchError(
            f"the plan was made for another model ({plan.model.name}, "
            f"{plan.model.num_parameters} parameters, fingerprint {plan.model.fingerprint[:12]}); "
            f"this one has fingerprint {fingerprint(graph)[:12]}; plan this model"
        )


def _inputs_text(inputs: tuple[ModelInput, ...]) -> str:
    return ", ".join(f"{name} {dtype}{list(shape)}" for name, shape, dtype in inputs)


def _rank_mesh(
    model: nn.Module, plan: Plan, program: EmittedProgram | EmittedPipeline
) -> RankMesh | None:
    """This process on the plan's mesh; None without a process group, except for one device."""
    if not _is_in_job():
        return single_mesh(plan.mesh, _device_of(model)) if plan.world_size == 1 else None
    # NCCL joins the devices that the processes have made current, gloo their CPUs.
    is_cuda = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
    return process_mesh(plan.mesh, device, program.axis_sets(), program.levels)


def _is_in_job() -> bool:
    return dist.is_available() and dist.is_initialized()


def _device_of(model: nn.Module) -> torch.device:
    """Where the model's parameters are; the default device if they are on meta."""
    devices = [p.device for p in model.parameters() if not p.is_meta]
    return devices[0] if devices else torch.get_default_device()
