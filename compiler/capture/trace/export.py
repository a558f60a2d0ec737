"""Trace the fake copy with torch.export, keeping what a plain export would lose or hide.

torch.export(strict=False), then `run_decompositions`, which makes in-place ops pure. Its table
keeps linear, attention, norms and losses as single ops, and writes composite ops without a rule
(hstack, linalg.norm, prelu) in the ops that torch makes them of. Three things need care:

detaches          run_decompositions silently drops no_grad blocks and detach_; explicit
                  `detach` ops go in before it (meshfold.capture.gradients.detaches).
hidden state      a branch on a tensor's value, a draw from Python's or numpy's generator and a
                  Function of torch's own would each be baked in or lost: refused, with the line.
                  (A custom autograd.Function is one op: meshfold.capture.trace.functions.)
outputs           the loss and what is asked for besides, nothing else is captured
                  (meshfold.capture.trace.returned).
"""

import contextlib
import inspect
import itertools
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from meshfold.capture.gradients.detaches import (
    refuse_lost_gradients,
    refuse_severed,
    write_detaches,
)
from meshfold.capture.gradients.inner import InnerGradients
from meshfold.capture.gradients.route import Route
from meshfold.capture.gradients.strided_writes import write_strided_parts
from meshfold.capture.known_values.known_tensors import KnownTensors
from meshfold.capture.known_values.refusals import (
    function_name,
    refused_branch,
    refused_number,
)
from meshfold.capture.python_state.buffers import Buffers, refuse_valueless
from meshfold.capture.python_state.class_writes import written_through
from meshfold.capture.python_state.first_names import FirstNames, restore_names
from meshfold.capture.python_state.held_state import (
    Changes,
    HeldState,
    Kept,
    changed_state,
    fresh_kept,
    kept_leaves,
    plain_state,
    set_values,
)
from meshfold.capture.python_state.lost_calls import (
    DataReads,
    refuse_call,
    refuse_saved_tensor_hooks,
)
from meshfold.capture.python_state.outside_world import refuse_hidden_draws, refuse_seeding
from meshfold.capture.trace.failures import explain_failure
from meshfold.capture.trace.fake_model import ExampleInputs, FakeCopy
from meshfold.capture.trace.functions import FunctionCall
from meshfold.capture.trace.layer_drop import LayerDrops
from meshfold.capture.trace.returned import Chosen, chosen_outputs, name_outputs
from meshfold.capture.trace.traced_call import FIRST_CALL, TracedCall
from meshfold.capture.trace.value_checks import Answering, ValueChecks
from meshfold.errors import CaptureError
from meshfold.ir.returns import Returns
from meshfold.passes.rules.table import OP_RULES
from meshfold.torch_compat.autograd_functions import functions_met
from meshfold.torch_compat.composite_ops import decompositions
from meshfold.torch_compat.fake_tensors import (
    as_exporting,
    casts_of_nothing,
    fake_like,
    lazy_graphs,
)
from meshfold.torch_compat.functional_gradients import functional_gradients
from meshfold.torch_compat.source_lines import line_in, user_line
from meshfold.torch_compat.traced_parts import read_kept_results

SOURCE = "meshfold_source"
MODEL = "model"
"""Attribute of the traced wrapper that holds the fake copy, so the first part of every name."""
KEPT = "kept_"
"""Name, without a number, of a tensor that an earlier call has left."""


@dataclass(frozen=True)
class Exported:
    """`chosen`: the tensors that the program returns, of the model's return value. `program` is in
    decomposed form; its ops carry "file:line" as meta custom[SOURCE]. `changed`: the plain state
    that forward changed; `kept`, `held`, `remade`: what else. `drops`: layers that a branch may
    skip. `functions`: what its ops `meshfold::function` stand for. `notes`: what was left out.
    `differentiated`: the inputs that forward takes gradients of."""

    program: ExportedProgram
    chosen: Chosen
    changed: Changes
    kept: Kept
    held: str
    remade: Mapping[str, str]
    drops: LayerDrops
    functions: Sequence[FunctionCall] = ()
    notes: tuple[str, ...] = ()
    differentiated: tuple[bool, ...] = ()


class _Watch(Answering):
    """Refuses branches on values, and remembers which call failed for the error message."""

    def __init__(
        self, drops: LayerDrops, checks: ValueChecks, known: KnownTensors | None, route: Route
    ) -> None:
        super().__init__(checks, known)
        self.drops = drops
        self.data_reads = DataReads()
        self.gradients = InnerGradients(route)
        self.failed = ""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.__bool__:
            if (answer := self.drops.answer(args[0], _line())) is not None:
                return answer
        data = self.data_reads.answer(func, args, _line)
        if data is not None or self.data_reads.sets(func, args, _line):
            return data
        refuse_call(func, args, kwargs or {}, _line)
        kwargs = self.gradients.filled(func, args, kwargs or {})
        try:
            with self.gradients.going_back(func, args, kwargs):
                result = super().__torch_function__(func, types, args, kwargs)
        except Exception:
            self.failed = self.failed or function_name(func)
            raise
        result = self.gradients.seen(func, args, kwargs or {}, result, _line)
        refuse_dynamic(result, func)
        self.drops.see(func, args, result)
        return result


def _line() -> str:
    return user_line(traceback.walk_stack(inspect.currentframe()))


def refuse_dynamic(result: Any, func: Any) -> None:
    """Refuse a number or a shape that depends on the values of a tensor."""
    for part in result if isinstance(result, (tuple, list)) else (result,):
        sizes = part.shape if isinstance(part, torch.Tensor) else (part,)
        if any(isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) for size in sizes):
            raise refused_number(function_name(func), _line())


class _Traced(nn.Module):
    """The fake copy with tensors in and tensors out, for torch.export."""

    def __init__(
        self, fake: FakeCopy, inputs: ExampleInputs, watch: _Watch, report: "_Report"
    ) -> None:
        super().__init__()
        self.model = fake.module
        for k, tensor in enumerate(kept_leaves(report.call.found)):
            self.register_buffer(f"{KEPT}{k}", fake_like(tensor, fake.mode))
        self.inputs = inputs
        self.watch = watch
        self.report = report

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Here: these are what is traced, wherever the model finds them.
        found = (self.get_buffer(f"{KEPT}{k}") for k in itertools.count())
        set_values(self.model, fresh_kept(self.report.call.found, lambda _: next(found)))
        before, buffers = plain_state(self.model), Buffers(self.model)
        held = HeldState(self.model)
        with (
            # Here too: torch prints the whole graph so far where it meets a data-dependent error.
            explain_failure(self.watch),
            self.watch,
            self.watch.gradients.route.traced(),
            functional_gradients(),
            self.watch.drops.watching(),
            refuse_seeding(),
            refuse_saved_tensor_hooks(_line),
        ):
            returned = self.inputs.call(self.model, tensors)
        named = name_outputs(returned)
        self.watch.data_reads.refuse_written(named.values())
        self.watch.gradients.refuse_accumulated(self.model, tensors)
        # Here: torch.export sets attributes back.
        self.report.changed = changed_state(before, self.model)
        self.report.kept = held.kept(self.model)
        self.report.remade = buffers.remade()
        numbers = self.watch.checks.kept_numbers()
        known = (*self.report.changed, *self.report.kept)
        self.report.held = held.change(self.model, known) or numbers
        if not named:
            op = type(self.model).__name__
            raise CaptureError("the model returns no tensor; return its loss", op=op)
        leaves = self.watch.gradients.refuse_kept(self.model)
        self.report.differentiated = tuple(x.requires_grad for x in tensors)
        reached = {*self.model.parameters(), *leaves, *tensors}
        self.report.reached = refuse_lost_gradients(named.values(), reached)
        with self.watch:
            chosen = chosen_outputs(returned, self.report.returns)
        tensors_checked = self.watch.checks.kept(chosen.tensors)
        self.report.chosen = replace(chosen, tensors=tensors_checked)
        buffers.write_replaced()
        also = kept_leaves(self.report.kept) if self.report.call.marks_kept else []
        return *tensors_checked.values(), *self.report.marked, *also


class _Report:
    """What the wrapper saw. A plain object: export forbids new attributes on the module itself."""

    def __init__(self, returns: Returns, marked: Sequence[torch.Tensor], call: TracedCall) -> None:
        self.returns = returns
        self.marked = marked
        self.call = call
        self.changed: Changes = {}
        self.kept: Kept = {}
        self.held = ""
        self.remade: Mapping[str, str] = {}
        self.chosen = Chosen({})
        self.reached: set[torch.Tensor] = set()
        self.differentiated: tuple[bool, ...] = ()


def export_fake(
    fake: FakeCopy,
    inputs: ExampleInputs,
    returns: Returns,
    marked: Sequence[torch.Tensor] = (),
    *,
    call: TracedCall = FIRST_CALL,
    runs_checks: bool = False,
    known: KnownTensors | None = None,
) -> Exported:
    """Trace the fake copy. returns: what of its return value is computed. `marked` is read after
    the model ran: tensors to return besides its own. call: which call of the copy, prepared as it
    says; what it finds is called KEPT and its number. runs_checks: keep assertions on values.
    known: None where calls that share a trace may differ.

    Raises CaptureError with op and source line.
    """
    watch = _Watch(LayerDrops(call.skips), ValueChecks(runs=runs_checks), known, fake.route)
    report = _Report(returns, marked, call)
    traced = _Traced(fake, inputs, watch, report)

    def rerun() -> None:
        with fake.mode:
            traced(*inputs.tensors)

    with (
        _quiet(),
        lazy_graphs(),
        casts_of_nothing(),
        torch.enable_grad(),
        written_through(fake.module),
        explain_failure(watch),
        functions_met(fake.functions.on_call),
        refuse_hidden_draws(rerun),
    ):
        first = FirstNames(traced)
        for _ in range(call.num_calls - 1):
            with as_exporting():
                rerun()
        moved = first.moved()
        program = torch.export.export(traced, inputs.tensors, strict=False)
        program = _in_pure_ops(program, traced)
        restore_names(program, moved)
    drops = watch.drops
    if drops.num_branches != drops.num_chosen and not call.skips:
        raise refused_branch("Tensor.__bool__", drops.source)
    met = tuple(fake.functions.calls), (*watch.checks.notes(), *watch.selections.notes())
    held = report.changed, report.kept, report.held, report.remade
    return Exported(program, report.chosen, *held, drops, *met, report.differentiated)


def _in_pure_ops(program: ExportedProgram, traced: _Traced) -> ExportedProgram:
    """What torch.export made of `traced`, with all that stops a gradient written down."""
    gradients = traced.watch.gradients
    if not gradients.asked:  # else what is missing is told with more words below
        refuse_valueless(program)
    gradients.refuse_unseen(program.constants)
    _stamp_sources(program.graph_module)
    read_kept_results(program.graph_module)
    write_detaches(program.graph_module)
    _drop_unread_aliases(program)
    if gradients.asked:
        refuse_severed(program, traced.report.reached, dict(traced.named_parameters()))
    return _decomposed(program)


def _drop_unread_aliases(program: ExportedProgram) -> None:
    """Drop the second name of a tensor that is read under its first: run_decompositions takes no
    tensor twice that is written to (a batch norm that two places of a model share)."""
    named = (InputKind.PARAMETER, InputKind.BUFFER)
    signature = program.graph_signature
    held = {**program.constants, **program.state_dict}
    tensors = {
        spec.arg.name: held.get(str(spec.target))
        for spec in signature.input_specs
        if spec.kind in named
    }
    num_names = Counter(id(tensor) for tensor in tensors.values() if tensor is not None)
    for node in program.graph.find_nodes(op="placeholder"):
        tensor = tensors.get(node.name)
        if tensor is not None and not node.users and num_names[id(tensor)] > 1:
            num_names[id(tensor)] -= 1
            signature.input_specs[:] = [s for s in signature.input_specs if s.arg.name != node.name]
            program.graph.erase_node(node)


def _decomposed(program: ExportedProgram) -> ExportedProgram:
    """`program` in pure ops, composite ones without a rule in what torch makes them of."""
    has_statistics = any(map(_updates_statistics, program.graph.nodes))

    def stays(op: str) -> bool:
        if op == _INSTANCE_NORM and has_statistics:
            return False
        return op in OP_RULES or op.startswith((*_READ_BY_REWRITES, *_CHECKED))

    found: ExportedProgram | None = None
    table = decompositions(program.graph_module, stays)
    # Some ops ask for values on the way, or check them: everything stays as it is called then.
    with contextlib.suppress(Exception):
        found = program.run_decompositions(table) if table else None
    if found is None or _has_tokens(found):
        found = program.run_decompositions({})
    write_strided_parts(found.graph)
    return found


def _has_tokens(program: ExportedProgram) -> bool:
    """Whether ops with effects are in order, of which a graph of pure ops knows nothing."""
    return any(s.kind is InputKind.TOKEN for s in program.graph_signature.input_specs)


def _updates_statistics(node: fx.Node) -> bool:
    """Whether an instance norm changes its running statistics, in place where no graph sees it."""
    if str(node.target) != _INSTANCE_NORM:
        return False
    return node.args[3] is not None and node.args[5] is True


_INSTANCE_NORM = "aten.instance_norm.default"
_READ_BY_REWRITES = ("aten.embedding_bag.", "aten.type_as.")
"""Ops without a rule that a rewrite knows (meshfold.capture.rewrites)."""
_CHECKED = tuple(
    f"aten.{name}."
    for name in (
        *("inverse", "linalg_cholesky", "linalg_eig", "linalg_inv", "linalg_ldl_factor"),
        *("linalg_lu_factor", "linalg_matrix_power", "linalg_pinv", "linalg_solve"),
        *("linalg_tensorinv", "linalg_tensorsolve", "quantile", "nanquantile"),
    )
)
"""Ops made of one that raises by values, which a graph of pure ops cannot hold."""


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what torch.export says of its own use of pytrees, of tensors that a module keeps as
    attributes (the fake copy is thrown away), and of gradients that InnerGradients refuses."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*treespec, LeafSpec.*", category=FutureWarning)
        warnings.filterwarnings("ignore", message=".*assigned during export.*")
        warnings.filterwarnings("ignore", message=".*lifted_tensor.* requires gradient.*")
        warnings.filterwarnings(
            "ignore", message=".*grad attribute of a Tensor that is not a leaf.*"
        )
        yield


def _stamp_sources(module: fx.GraphModule) -> None:
    """Keep each op's line where run_decompositions keeps it, blocks included."""
    for node in module.graph.nodes:
        if node.op == "call_function":
            source = line_in(node.meta.get("stack_trace") or "")
            node.meta["custom"] = {**node.meta.get("custom", {}), SOURCE: source}
    for child in module.children():
        if isinstance(child, fx.GraphModule):
            _stamp_sources(child)
