"""Trace a fake copy in which equal children are call nodes, instead of tracing every child.

    plan_calls   the plain run: decisions for every call of a child (meshfold.capture.dedup.classes)
    CallTracer   the session of the export: follows the decisions, and checks every one of them
    strip        deletes the tensors of children that are only call nodes: an export takes its time
                 per parameter tensor

The plain run and the export are not the same program (models build their masks differently while
traced), so the tracer recomputes every key and read set and raises RetraceError on a
difference.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshfold.capture.dedup.arguments import NotPlainError, comparable
from meshfold.capture.dedup.classes import (
    CallClass,
    ChildCall,
    Decision,
    Learner,
    Role,
    describe_call,
    describe_results,
)
from meshfold.capture.dedup.graph_ops import CallLabel, MarkLabel, call, mark
from meshfold.capture.dedup.modules import Child, wrapped
from meshfold.capture.dedup.structure import Structure
from meshfold.capture.gradients.inner import NoInnerGradients
from meshfold.capture.python_state.snapshots import Snapshot, attributes_of, shared_state
from meshfold.capture.trace.failures import RetraceError
from meshfold.capture.trace.fake_model import ExampleInputs, FakeCopy
from meshfold.capture.trace.value_checks import Answering, ValueChecks
from meshfold.torch_compat.autograd_functions import functions_met
from meshfold.torch_compat.fake_tensors import as_exporting, casts_of_nothing
from meshfold.torch_compat.global_hooks import global_hooks
from meshfold.torch_compat.pytree import fill_slots


@dataclass(frozen=True)
class CallPlan:
    """`decisions` in calling order; `refusals` say why children that look alike are traced."""

    decisions: tuple[Decision, ...] = ()
    refusals: tuple[str, ...] = ()

    @property
    def has_stubs(self) -> bool:
        return any(d.role is Role.STUB for d in self.decisions)


def plan_calls(fake: FakeCopy, inputs: ExampleInputs, children: Sequence[Child]) -> CallPlan:
    """Run the fake copy once on fake tensors, skipping every call that equals an earlier one.

    Raises RetraceError if the model cannot be run that way, whatever the reason.
    """
    if registered := global_hooks():
        raise RetraceError(f"hooks of all modules are registered ({', '.join(registered)})")
    learner = Learner(fake.module)
    structure = Structure(fake.module)
    before = Snapshot({**attributes_of(fake.module), **shared_state(fake.module)}, context=True)
    checks = ValueChecks()
    try:
        with (
            fake.mode,
            as_exporting(),
            casts_of_nothing(),
            torch.enable_grad(),
            wrapped(children, learner),
            functions_met(fake.functions.on_call),
            learner.recorder.watching(),
            Answering(checks),
            NoInnerGradients(),
        ):
            inputs.call(fake.module, inputs.tensors)
        if numbers := checks.kept_numbers():
            raise RetraceError(f"the first run of the model keeps numbers of tensors ({numbers})")
        if installed := structure.change():
            raise RetraceError(f"the first run of the model {installed}")
    except RetraceError:
        raise
    except Exception as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise RetraceError(f"the first run failed: {reason}") from error
    finally:
        learner.restore()
        before.restore()
    return CallPlan(tuple(learner.decisions()), tuple(learner.refusals()))


def strip(children: Sequence[Child], decisions: Sequence[Decision]) -> None:
    """Delete parameters and buffers of children that are call nodes in every call."""
    roles: dict[str, set[Role]] = {}
    for decision in decisions:
        roles.setdefault(decision.scope, set()).add(decision.role)
    traced = [s for s, r in roles.items() if r & {Role.QUIET, Role.LAST}]
    for child in children:
        inside_traced = any(child.scope.startswith(scope + ".") for scope in traced)
        if roles.get(child.scope) == {Role.STUB} and not inside_traced:
            for module in child.module.modules():
                module._parameters.clear()
                module._buffers.clear()


class CallTracer:
    """Session of the export. `marked` are results of traced members: as outputs of the export they
    keep the full body alive, whatever of it the model needs."""

    def __init__(self, decisions: Sequence[Decision]) -> None:
        self.decisions = decisions
        self.num_calls = 0
        self.is_quiet = False
        self.marked: list[torch.Tensor] = []

    def on_call(self, child: Child, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.is_quiet:
            return forward(*args, **kwargs)
        number = self.num_calls
        self.num_calls += 1
        if number >= len(self.decisions):
            raise RetraceError(f"{child.scope} is called once more when traced")
        decision = self.decisions[number]
        if decision.scope != child.scope:
            raise RetraceError(f"{child.scope} is called where {decision.scope} was expected")
        if decision.role is Role.PLAIN:
            return forward(*args, **kwargs)
        if decision.role is Role.QUIET:
            return self._quietly(lambda: forward(*args, **kwargs))
        this = describe_call(child, args, kwargs)
        if this is None or this.key != decision.key:
            raise RetraceError(f"{child.scope} is called with other arguments when traced")
        call_class = decision.call_class
        assert call_class is not None
        if decision.role is Role.STUB:
            return self._stub(child, call_class, number, this)
        if decision.role is Role.FIRST:
            call_class.recording.see_context()
            return self._traced(child, call_class, number, this, forward)
        return self._quietly(lambda: self._traced(child, call_class, number, this, forward))

    def _quietly(self, run: Callable[[], Any]) -> Any:
        self.is_quiet = True
        try:
            return run()
        finally:
            self.is_quiet = False

    def _stub(self, child: Child, call_class: CallClass, number: int, this: ChildCall) -> Any:
        results = call_class.results
        assert results is not None
        different = call_class.recording.difference(child.module)
        if different:
            raise RetraceError(f"{child.scope} would read another {different} when traced")
        label = CallLabel(number, call_class.members[0], results.facts)
        return results.fill(call(this.tensors, label), this.tensors)

    def _traced(
        self,
        child: Child,
        call_class: CallClass,
        number: int,
        this: ChildCall,
        run: Callable[..., Any],
    ) -> Any:
        first = call_class.members[0]
        arguments = [mark(t, MarkLabel(number, first, True, k)) for k, t in enumerate(this.tensors)]
        args, kwargs = fill_slots(this.template, arguments)
        returned = run(*args, **kwargs)
        expected = call_class.results
        assert expected is not None
        try:
            results, fresh = describe_results(returned, arguments)
        except NotPlainError as error:
            raise RetraceError(f"{child.scope} returns {error} when traced") from error
        same = comparable(results.template) == comparable(expected.template)
        if not same or results.facts != expected.facts:
            raise RetraceError(f"{child.scope} returns something else when traced")
        outputs = [mark(t, MarkLabel(number, first, False, k)) for k, t in enumerate(fresh)]
        self.marked += outputs
        return results.fill(outputs, this.tensors)
