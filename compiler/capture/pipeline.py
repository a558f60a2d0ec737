"""Capture: an unmodified model and example inputs become a folded op graph.

    model --fake_copy--> fake --export_fake--> exported --read_program--> program
          --with_layers, with_draws, with_bags, plain_indices, plain_masks, real_writes--> program
          --with_norms, with_gelus, with_gated_products, with_narrow_logits--> program
          --share_scatters, join_experts, with_dispatch--> program
          --number--> flat graph --with_custom_ops--> flat graph --fold--> folded graph

Forward only; no weights are needed or allocated, so the model may be on the meta device. The first
layer of the compiler that runs the user's code, and the last.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from meshfold.capture.custom_ops.annotate import with_custom_ops
from meshfold.capture.dedup.expand import expand_calls
from meshfold.capture.dedup.modules import Child, find_children, wrapped
from meshfold.capture.dedup.tracer import CallPlan, CallTracer, plan_calls, strip
from meshfold.capture.gradients.route import NextStepError, Route
from meshfold.capture.known_values.fixed_buffers import (
    choices_of_buffers,
    fix_buffers,
    fixed_buffers_note,
)
from meshfold.capture.known_values.fixed_inputs import fixed_note, graph_structure
from meshfold.capture.known_values.known_tensors import KnownTensors
from meshfold.capture.known_values.refusals import refused_branch
from meshfold.capture.next_call import call_with_caches, refuse_other_next_call
from meshfold.capture.python_state.buffers import refuse_remade
from meshfold.capture.python_state.held_state import Changes, Kept
from meshfold.capture.python_state.lost_calls import refuse_gradient_hooks
from meshfold.capture.python_state.outside_world import refuse_questions, spaces_of
from meshfold.capture.python_state.snapshots import Snapshot, shared_state
from meshfold.capture.python_state.written_state import WrittenParametersError
from meshfold.capture.rewrites.causal_masks import plain_masks
from meshfold.capture.rewrites.complex_writes import real_writes
from meshfold.capture.rewrites.draws import with_draws
from meshfold.capture.rewrites.embedding_bag import with_bags
from meshfold.capture.rewrites.expert_dispatch import with_dispatch
from meshfold.capture.rewrites.expert_linear import join_experts
from meshfold.capture.rewrites.gated_products import with_gated_products
from meshfold.capture.rewrites.gelu_formulas import with_gelus
from meshfold.capture.rewrites.grouped_queries import with_grouped_queries
from meshfold.capture.rewrites.lasting_values import with_lasting_values
from meshfold.capture.rewrites.masked_scatter import share_scatters
from meshfold.capture.rewrites.narrow_logits import with_narrow_logits
from meshfold.capture.rewrites.ordered_indices import plain_indices
from meshfold.capture.rewrites.recurrence import with_layers
from meshfold.capture.rewrites.refusals import refuse_draws, refuse_steps
from meshfold.capture.rewrites.rms_norms import with_norms
from meshfold.capture.rewrites.skipped_layers import with_skips
from meshfold.capture.trace.checkpointed_calls import CheckpointedCalls, plain_checkpoints
from meshfold.capture.trace.export import Exported, export_fake
from meshfold.capture.trace.failures import RetraceError
from meshfold.capture.trace.fake_model import (
    ExampleInputs,
    FakeCopy,
    Names,
    fake_copy,
    flatten_inputs,
    model_names,
)
from meshfold.capture.trace.functions import FunctionCalls
from meshfold.capture.trace.layer_drop import LayerDrops
from meshfold.capture.trace.loss_function import LossFunction, check_arguments
from meshfold.capture.trace.lower import read_program
from meshfold.capture.trace.module_names import refuse_lazy, refuse_names
from meshfold.capture.trace.raw_program import RawProgram, number
from meshfold.capture.trace.returned import NOTHING
from meshfold.capture.trace.structures import Node
from meshfold.capture.trace.traced_call import FIRST_CALL, TracedCall
from meshfold.errors import CaptureError, OptionError
from meshfold.gc_pause import collector_paused
from meshfold.ir.custom_ops import CustomRule
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.options import Precision, ValueChecks
from meshfold.ir.returns import LOSS_ALONE, Returns
from meshfold.passes.fold.assemble import fingerprint
from meshfold.passes.fold.find_regions import fold
from meshfold.torch_compat.flex_attention import dense_flex_attention
from meshfold.torch_compat.quiet_logs import quiet_logs


@dataclass(frozen=True)
class Wanted:
    """What of a model is captured: see `capture`."""

    returns: Returns
    loss_fn: LossFunction | None
    precision: Precision
    rules: tuple[CustomRule, ...]
    runs_checks: bool
    fixed: tuple[str, ...] = ()
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Captured:
    """graph: the folded program; with a loss, only what it and the outputs asked for need.
    constants: values of CONSTANT sources by name, small CPU tensors.
    structure: what a step returns around the outputs of `graph`, by their names.
    no_loss: why the first output is no loss, for the user.
    rules: of custom ops, as they were given. checkpointed: what the model asks to be recomputed.
    fixed: values that inputs have in every batch, by path; these are no inputs of the graph.
    fixed_buffers: values of buffers that forward decides by, by name; the graph reads none."""

    graph: FoldedGraph
    constants: Mapping[str, torch.Tensor]
    structure: Node = NOTHING
    no_loss: str = ""
    rules: tuple[CustomRule, ...] = ()
    checkpointed: tuple[str, ...] = ()
    fixed: Mapping[str, torch.Tensor] = field(default_factory=dict)
    fixed_buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)


def capture(
    model: nn.Module,
    example_inputs: Mapping[str, Any],
    *,
    full_capture: bool = False,
    precision: Precision = "model",
    returns: Returns = LOSS_ALONE,
    loss_fn: LossFunction | None = None,
    rules: Sequence[CustomRule] = (),
    value_checks: ValueChecks = "drop",
    fixed_inputs: Sequence[str] = (),
) -> Captured:
    """Capture `model(**example_inputs)`.

    example_inputs are keyword arguments; tensors, nested in dicts, lists and tuples too, become
    inputs (only their shapes and dtypes are read), anything else a constant of the capture.
    full_capture traces every layer, where otherwise layers proven equal are traced once.
    precision: what it is to compute in (meshfold.capture.trace.mixed_precision). returns: what of
    its return value; loss_fn: what computes the loss of that and the rest of the example inputs
    (meshfold.capture.trace.loss_function). rules: of custom ops that the model calls.
    value_checks: whether its assertions on values are left out or run; to be run, every layer is
    traced, as they are with fixed_inputs: names of integer inputs whose values are those of the
    example in every batch (meshfold.capture.known_values.fixed_inputs has those that always are,
    and those of graphs).
    The model is used as it is: train or eval mode, dtype, ties. It is not changed.

    Raises CaptureError, naming op and source line, if the model cannot be captured, and
    OptionError if example_inputs holds no tensor, or not the arguments of the model, or a rule is
    wrong.
    """
    refuse_lazy(model)
    check_arguments(model, example_inputs, loss_fn)
    if not returns.has_loss:
        loss_fn = None
    runs_checks, names = value_checks == "run", tuple(fixed_inputs)
    wanted = Wanted(returns, loss_fn, precision, tuple(rules), runs_checks, names)
    shared = Snapshot(shared_state(model), context=True)
    try:
        with (
            collector_paused(),
            quiet_logs(),
            plain_checkpoints() as checkpoints,
            dense_flex_attention(),
        ):
            captured = _capture_as_it_can_be(model, example_inputs, full_capture, wanted, shared)
        return _with_checkpoints(captured, checkpoints)
    finally:
        # What forward keeps there are fake tensors and hooks of the fake copy.
        shared.restore()


def _with_checkpoints(captured: Captured, calls: CheckpointedCalls) -> Captured:
    """`captured` with a note of what the model asks to be recomputed."""
    if not calls.names:
        return captured
    graph = replace(captured.graph, notes=(*captured.graph.notes, calls.note))
    return replace(captured, graph=graph, checkpointed=calls.names)


def _capture_as_it_can_be(
    model: nn.Module,
    example_inputs: Mapping[str, Any],
    full_capture: bool,
    wanted: Wanted,
    shared: Snapshot,
) -> Captured:
    """The capture; with the structure of a graph fixed, or what buffers of one number hold, where
    there is none otherwise."""
    try:
        return _capture(model, example_inputs, full_capture, wanted, shared)
    except CaptureError:
        others = []
        if structure := graph_structure(example_inputs, wanted.fixed):
            others.append(replace(wanted, fixed=(*wanted.fixed, *structure)))
        others += (replace(wanted, buffers=x) for x in choices_of_buffers(model))
        for other in others:
            with contextlib.suppress(CaptureError, OptionError):
                return _capture(model, example_inputs, full_capture, other, shared)
        raise


def _readable(model: nn.Module, precision: Precision) -> Names:
    """The names of a model; refuses what no capture can read."""
    refuse_gradient_hooks(model)
    refuse_names(model)
    return model_names(model, precision)


def _capture(
    model: nn.Module,
    example_inputs: Mapping[str, Any],
    full_capture: bool,
    wanted: Wanted,
    shared: Snapshot,
) -> Captured:
    """shared: what forward can change besides the model, before it is called."""
    names = _readable(model, precision := wanted.precision)
    functions, route = FunctionCalls(wanted.rules), Route()

    def traced(has_calls: bool, note: str = "", call: TracedCall = FIRST_CALL) -> _Trace:
        nonlocal names
        shared.restore()  # every trace begins as the first one does
        fake = replace(fake_copy(model, precision), functions=functions, route=route)
        fix_buffers(fake.module, wanted.buffers)
        call.prepare(fake.module)
        inputs = flatten_inputs(example_inputs, fake.mode, precision, wanted.loss_fn, wanted.fixed)
        is_fixed = inputs.fixed or wanted.buffers
        children = find_children(fake.module) if has_calls and not is_fixed else []
        noted = _noted(fake, note, fixed_buffers_note(wanted.buffers), inputs)
        try:
            return _trace(noted, inputs, names, children, wanted, call)
        except NextStepError:
            pass
        except WrittenParametersError as found:
            names = model_names(model, precision, found.names | {b.name for b in names.buffers})
        return traced(has_calls, note, call)

    try:
        trace = traced(not full_capture and not wanted.runs_checks)
    except RetraceError as error:
        trace = traced(False, f"every layer was traced in full: {error}")

    def is_same(call: TracedCall = FIRST_CALL) -> bool:
        return _is_same(traced(False, call=call).captured, trace.captured)

    def is_same_with_caches() -> bool:
        first = traced(False, call=TracedCall(marks_kept=True))
        second = traced(False, call=call_with_caches(first))
        programs = [with_lasting_values(one.program) for one in (first, second)]
        graphs = [number(one, names, first.captured.graph.inputs, ()).graph for one in programs]
        is_alike = fingerprint(graphs[0]) == fingerprint(graphs[1])
        return is_alike and _is_same(first.captured, trace.captured)

    refuse_remade(trace.remade, lambda: traced(False, call=TracedCall(num_calls=2)).remade)
    refuse_other_next_call(trace, is_same, is_same_with_caches)
    refuse_questions(spaces_of(model, *filter(None, [wanted.loss_fn])), is_same)
    _refuse_other_branches(trace, lambda: traced(False, call=TracedCall(skips=True)))
    return replace(trace.captured, fixed_buffers=wanted.buffers)


def _noted(fake: FakeCopy, note: str, of_buffers: str, inputs: ExampleInputs) -> FakeCopy:
    fixed = map(fixed_note, inputs.fixed, inputs.fixed.values())
    return replace(fake, notes=(*fake.notes, *filter(None, [note, of_buffers]), *fixed))


def _is_same(some: Captured, other: Captured) -> bool:
    """Whether they compute the same, of the same constants."""
    constants, others = some.constants, other.constants
    return (
        fingerprint(some.graph) == fingerprint(other.graph)
        and constants.keys() == others.keys()
        and all(torch.equal(x, others[name]) for name, x in constants.items())
    )


def _refuse_other_branches(trace: "_Trace", skipping: Callable[[], "_Trace"]) -> None:
    """Refuses branches on draws that do more than skip a layer. skipping: traces the model as it is
    where all of them skip."""
    if not trace.drops.num_branches:
        return
    try:
        is_same = skipping().skipped == trace.skipped
    except CaptureError:
        is_same = False
    if not is_same:
        raise refused_branch("Tensor.__bool__", trace.drops.source)


@dataclass(frozen=True)
class _Trace:
    """program: as it was read, before what makes it fast. changed, kept, held, remade: the state
    that forward changed. drops: layers that it may skip. skipped: the fingerprint of the program
    without them."""

    captured: Captured
    program: RawProgram
    changed: Changes
    kept: Kept
    held: str
    remade: Mapping[str, str]
    drops: LayerDrops
    skipped: str


def _trace(
    fake: FakeCopy,
    inputs: ExampleInputs,
    names: Names,
    children: Sequence[Child],
    wanted: Wanted,
    call: TracedCall,
) -> _Trace:
    """Trace the fake copy, with call nodes for those of `children` that equal one traced before.

    Raises RetraceError if a proof of that fails, or anything else with call nodes in play: an error
    of the model itself shows again, with its line, when everything is traced.
    """
    plan = plan_calls(fake, inputs, children) if children else CallPlan()
    notes = (*fake.notes, *plan.refusals)
    if not plan.has_stubs:
        exported = export_fake(
            fake,
            inputs,
            wanted.returns,
            call=call,
            runs_checks=wanted.runs_checks,
            known=KnownTensors(),
        )
        program = read_program(exported, names, inputs.infos, call.sources)
        return _traced(program, names, inputs, exported, notes, wanted.rules)
    strip(children, plan.decisions)
    tracer = CallTracer(plan.decisions)
    try:
        with wrapped(children, tracer):
            exported = export_fake(fake, inputs, wanted.returns, tracer.marked, call=call)
        program = expand_calls(read_program(exported, names, inputs.infos), names)
    except CaptureError as error:
        raise RetraceError(str(error)) from error
    return _traced(program, names, inputs, exported, notes, wanted.rules)


def _traced(
    program: RawProgram,
    names: Names,
    inputs: ExampleInputs,
    exported: Exported,
    notes: Sequence[str],
    rules: Sequence[CustomRule],
) -> _Trace:
    drops, skipped = exported.drops, ""
    if drops.num_branches:
        kept = _fold(with_skips(program), names, inputs, exported, (), rules)
        skipped = fingerprint(kept.graph)
        notes = (
            *notes,
            f"LayerDrop: {drops.num_chosen} layers are skipped by chance; they are computed in "
            "any case, and a skipped one gets gradients of zeros, where the model leaves None",
        )
    captured = _fold(program, names, inputs, exported, notes, rules)
    held = exported.changed, exported.kept, exported.held, exported.remade
    return _Trace(captured, program, *held, drops, skipped)


def _lean(program: RawProgram) -> RawProgram:
    """`program` that keeps less for its backward, and computes the same."""
    grouped = with_grouped_queries(program)
    return with_narrow_logits(with_gated_products(with_gelus(with_norms(grouped))))


def _fold(
    program: RawProgram,
    names: Names,
    inputs: ExampleInputs,
    exported: Exported,
    notes: Sequence[str],
    rules: Sequence[CustomRule],
) -> Captured:
    refuse_steps(program)
    program = with_bags(with_draws(with_layers(program)))
    plain = real_writes(plain_masks(plain_indices(program)))
    routed = with_dispatch(join_experts(share_scatters(_lean(plain))))
    refuse_draws(routed)
    infos = tuple(
        replace(info, is_differentiated=is_differentiated)
        for info, is_differentiated in zip(inputs.infos, exported.differentiated, strict=True)
    )
    noted = number(routed, names, infos, (*notes, *exported.notes))
    flat = with_custom_ops(noted, rules)
    if not flat.graph.num_ops:
        raise CaptureError("the model computes nothing; return a loss that its ops make")
    folded = replace(fold(flat.graph, flat.stacks), returns=exported.chosen.returns)
    constants = dict(program.constants)
    chosen = exported.chosen
    return Captured(
        folded, constants, chosen.structure, chosen.no_loss, tuple(rules), fixed=inputs.fixed
    )
