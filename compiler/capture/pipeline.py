"""Capture: an unmodified model and example inputs become a folded op graph.

    model --fake_copy--> fake --export_fake--> exported --read_program--> program
          --with_draws, plain_masks, share_scatters, join_experts, with_dispatch--> program
          --number--> flat graph --fold--> folded graph

Forward only; no weights are needed or allocated, so the model may be on the meta device. The first
layer of the compiler that runs the user's code, and the last.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from meshfold.capture.dedup.expand import expand_calls
from meshfold.capture.dedup.modules import Child, find_children, wrapped
from meshfold.capture.dedup.tracer import CallPlan, CallTracer, plan_calls, strip
from meshfold.capture.rewrites.causal_masks import plain_masks
from meshfold.capture.rewrites.draws import with_draws
from meshfold.capture.rewrites.expert_dispatch import with_dispatch
from meshfold.capture.rewrites.expert_linear import join_experts
from meshfold.capture.rewrites.masked_scatter import share_scatters
from meshfold.capture.rewrites.refusals import refuse_draws, refuse_steps
from meshfold.capture.trace.checkpointed_calls import plain_checkpoints
from meshfold.capture.trace.export import Exported, RetraceError, export_fake
from meshfold.capture.trace.fake_model import (
    ExampleInputs,
    FakeCopy,
    Names,
    fake_copy,
    flatten_inputs,
    model_names,
)
from meshfold.capture.trace.loss_function import LossFunction, check_arguments
from meshfold.capture.trace.lower import read_program
from meshfold.capture.trace.module_names import refuse_names
from meshfold.capture.trace.python_state import (
    Changes,
    refuse_changing_state,
    refuse_gradient_hooks,
)
from meshfold.capture.trace.raw_program import RawProgram, number
from meshfold.capture.trace.returned import NOTHING
from meshfold.capture.trace.snapshots import Snapshot, shared_state
from meshfold.capture.trace.structures import Node
from meshfold.errors import CaptureError
from meshfold.gc_pause import collector_paused
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.options import Precision
from meshfold.ir.returns import LOSS_ALONE, Returns
from meshfold.passes.fold.assemble import fingerprint
from meshfold.passes.fold.find_regions import fold


@dataclass(frozen=True)
class Wanted:
    """What of a model is captured: see `capture`."""

    returns: Returns
    loss_fn: LossFunction | None
    precision: Precision


@dataclass(frozen=True)
class Captured:
    """graph: the folded program; with a loss, only what it and the outputs asked for need.
    constants: values of CONSTANT sources by name, small CPU tensors.
    structure: what a step returns around the outputs of `graph`, by their names.
    no_loss: why the first output is no loss, for the user."""

    graph: FoldedGraph
    constants: Mapping[str, torch.Tensor]
    structure: Node = NOTHING
    no_loss: str = ""


def capture(
    model: nn.Module,
    example_inputs: Mapping[str, Any],
    *,
    full_capture: bool = False,
    precision: Precision = "model",
    returns: Returns = LOSS_ALONE,
    loss_fn: LossFunction | None = None,
) -> Captured:
    """Capture `model(**example_inputs)`.

    example_inputs are keyword arguments; tensors, nested in dicts, lists and tuples too, become
    inputs (only their shapes and dtypes are read), anything else a constant of the capture.
    full_capture traces every layer, where otherwise layers proven equal are traced once.
    precision: what it is to compute in (meshfold.capture.trace.mixed_precision). returns: what of
    its return value; loss_fn: what computes the loss of that and the rest of the example inputs
    (meshfold.capture.trace.loss_function).
    The model is used as it is: train or eval mode, dtype, ties. It is not changed.

    Raises CaptureError, naming op and source line, if the model cannot be captured, and
    OptionError if example_inputs holds no tensor, or not the arguments of the model.
    """
    check_arguments(model, example_inputs, loss_fn)
    if not returns.has_loss:
        loss_fn = None
    wanted = Wanted(returns, loss_fn, precision)
    shared = Snapshot(shared_state(model), context=True)
    try:
        with collector_paused(), plain_checkpoints():
            return _capture(model, example_inputs, full_capture, wanted)
    finally:
        # What forward keeps there are fake tensors and hooks of the fake copy.
        shared.restore()


def _capture(
    model: nn.Module,
    example_inputs: Mapping[str, Any],
    full_capture: bool,
    wanted: Wanted,
) -> Captured:
    refuse_gradient_hooks(model)
    refuse_names(model)
    precision = wanted.precision
    names = model_names(model, precision)

    def traced(
        has_calls: bool, note: str = "", prepare: Callable[[nn.Module], None] = lambda _: None
    ) -> tuple[Captured, Changes]:
        fake = fake_copy(model, precision)
        prepare(fake.module)
        inputs = flatten_inputs(example_inputs, fake.mode, precision, wanted.loss_fn)
        fake = replace(fake, notes=(*fake.notes, *filter(None, [note])))
        children = find_children(fake.module) if has_calls else []
        return _trace(fake, inputs, names, children, wanted.returns)

    try:
        captured, changed = traced(not full_capture)
    except RetraceError as error:
        captured, changed = traced(False, f"every layer was traced in full: {error}")

    def is_same(prepare: Callable[[nn.Module], None]) -> bool:
        second, _ = traced(False, prepare=prepare)
        return fingerprint(second.graph) == fingerprint(captured.graph)

    refuse_changing_state(changed, is_same)
    return captured


def _trace(
    fake: FakeCopy,
    inputs: ExampleInputs,
    names: Names,
    children: Sequence[Child],
    returns: Returns,
) -> tuple[Captured, Changes]:
    """Trace the fake copy, with call nodes for those of `children` that equal one traced before.

    Raises RetraceError if a proof of that fails, or anything else with call nodes in play: an error
    of the model itself shows again, with its line, when everything is traced.
    """
    plan = plan_calls(fake, inputs, children) if children else CallPlan()
    notes = (*fake.notes, *plan.refusals)
    if not plan.has_stubs:
        exported = export_fake(fake, inputs, returns)
        program = read_program(exported, names, inputs.infos)
        return _fold(program, names, inputs, exported, notes), exported.changed
    strip(children, plan.decisions)
    tracer = CallTracer(plan.decisions)
    try:
        with wrapped(children, tracer):
            exported = export_fake(fake, inputs, returns, tracer.marked)
        program = expand_calls(read_program(exported, names, inputs.infos), names)
    except CaptureError as error:
        raise RetraceError(str(error)) from error
    return _fold(program, names, inputs, exported, notes), exported.changed


def _fold(
    program: RawProgram,
    names: Names,
    inputs: ExampleInputs,
    exported: Exported,
    notes: Sequence[str],
) -> Captured:
    refuse_steps(program)
    program = with_draws(program)
    routed = with_dispatch(join_experts(share_scatters(plain_masks(program))))
    refuse_draws(routed)
    flat = number(routed, names, inputs.infos, notes)
    if not flat.graph.num_ops:
        raise CaptureError("the model computes nothing; return a loss that its ops make")
    folded = replace(fold(flat.graph, flat.stacks), returns=exported.chosen.returns)
    constants = dict(program.constants)
    return Captured(folded, constants, exported.chosen.structure, exported.chosen.no_loss)
