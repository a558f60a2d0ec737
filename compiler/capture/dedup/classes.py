"""Classes of equal calls of child modules, found by one plain run of the fake copy.

Children of containers ask a session what to do when they are called
(meshfold.capture.dedup.modules). The Learner is the session of the first run:

    key of a call      skeleton of the child (types, names, tensors, ties, hooks), template and
                       tensors of its arguments, gradient and autocast mode
    first of a key     runs, while its read set is recorded
    later ones         same key and equal values for the full read set: the call is skipped and
                       gets empty results; unequal values make another class

A class is refused, and its members traced in full, when a call writes attributes, changes globals,
buffers or arguments, or returns something else than tensors and plain data.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
from torch import nn

from meshfold.capture.dedup.arguments import (
    NotPlainError,
    PassedThrough,
    comparable,
    pack,
)
from meshfold.capture.dedup.modules import Child
from meshfold.capture.dedup.read_sets import Recorder, Recording
from meshfold.capture.dedup.structure import Hooks
from meshfold.capture.python_state.snapshots import Snapshot, attributes_of
from meshfold.capture.trace.failures import RetraceError
from meshfold.capture.trace.tensor_facts import TensorFacts, empty_results, tensor_facts
from meshfold.torch_compat.pytree import TensorSlot, fill_slots, map_leaves

MIN_MEMBERS = 3
"""The first and the last member of a class are traced; with fewer there is nothing to skip."""


class Role(Enum):
    """What to do with a call when the fake copy is traced.

    PLAIN   trace it; calls inside it have roles of their own
    QUIET   trace it and everything inside it
    FIRST   as PLAIN, between marks: it stands for its class
    LAST    as QUIET, between marks: it proves its class
    STUB    one call node
    """

    PLAIN = auto()
    QUIET = auto()
    FIRST = auto()
    LAST = auto()
    STUB = auto()


@dataclass(frozen=True)
class Results:
    """What a call returns."""

    template: Any
    """A TensorSlot stands for a new tensor, a PassedThrough for an argument."""
    facts: tuple[TensorFacts, ...]
    requires_grad: tuple[bool, ...]

    def fill(self, tensors: Sequence[torch.Tensor], arguments: Sequence[torch.Tensor]) -> Any:
        def passed(leaf: Any) -> Any:
            return arguments[leaf.index] if isinstance(leaf, PassedThrough) else leaf

        return map_leaves(passed, fill_slots(self.template, tensors))


@dataclass
class CallClass:
    """Calls that run the same ops. `members` are call numbers, the first being the one recorded."""

    recording: Recording
    results: Results | None = None
    members: list[int] = field(default_factory=list)
    refused: str = ""


@dataclass(frozen=True)
class Decision:
    """What was found for one call, in order of calling."""

    scope: str
    key: object
    role: Role
    call_class: CallClass | None = None


@dataclass(frozen=True)
class ChildCall:
    """The arguments of a call: `template` is of (args, kwargs), `key` what equal calls share."""

    key: object
    template: Any
    tensors: list[torch.Tensor]


def describe_call(child: Child, args: Any, kwargs: Any) -> ChildCall | None:
    """None if an argument is neither tensor nor plain data."""
    try:
        template, tensors = pack((args, dict(kwargs)))
    except NotPlainError:
        return None
    modes = (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
    )
    facts = tuple(map(tensor_facts, tensors))
    return ChildCall((child.skeleton, comparable(template), facts, modes), template, tensors)


class Learner:
    """Session of the plain run: finds classes and skips what is known."""

    def __init__(self, model: nn.Module) -> None:
        self.recorder = Recorder(model)
        self.attributes = attributes_of(model)
        self.hooks = Hooks(model)
        self.classes: dict[object, list[CallClass]] = {}
        self.calls: list[Decision] = []
        self.differences: dict[object, list[str]] = {}

    def on_call(self, child: Child, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if registered := self.hooks.registered(child.module):
            raise RetraceError(f"the model registers {registered} when {child.scope} is called")
        number = len(self.calls)
        call = describe_call(child, args, kwargs)
        if call is None:
            self.calls.append(Decision(child.scope, None, Role.PLAIN))
            return forward(*args, **kwargs)
        key, tensors = call.key, call.tensors
        known = self.classes.setdefault(key, [])
        differences = [c.recording.difference(child.module) for c in known]
        same = next((c for c, d in zip(known, differences, strict=True) if not d), None)
        if same is not None and same.results is not None:
            self.calls.append(Decision(child.scope, key, Role.STUB, same))
            same.members.append(number)
            self.recorder.adopt(same.recording)
            return _fabricate(same.results, tensors)
        if any(c.refused for c in known):
            self.calls.append(Decision(child.scope, key, Role.PLAIN))
            return forward(*args, **kwargs)
        self.differences.setdefault(key, []).extend(differences[:1])
        return self._first(child, call, {"args": args, **kwargs}, lambda: forward(*args, **kwargs))

    def _first(
        self, child: Child, call: ChildCall, arguments: dict[str, Any], run: Callable[[], Any]
    ) -> Any:
        key, tensors = call.key, call.tensors
        number = len(self.calls)
        versions = [t._version for t in tensors]
        before = Snapshot({**self.attributes, "an argument": arguments})
        with self.recorder.recording(child.module) as recording:
            found = CallClass(recording, members=[number])
            self.calls.append(Decision(child.scope, key, Role.FIRST, found))
            returned = run()
        if recording.problems:
            found.refused = recording.problems[0]
        elif versions != [t._version for t in tensors]:
            found.refused = "an argument is changed in place"
        elif changed := before.change():
            found.refused = f"{changed} is changed"
        else:
            try:
                found.results, _ = describe_results(returned, tensors)
            except NotPlainError as error:
                found.refused = f"it returns {error}"
        self.classes[key].append(found)
        return returned

    def restore(self) -> None:
        """Undo what the run changed in globals and classes: the model is going to run once more."""
        for classes in reversed(self.classes.values()):
            for found in reversed(classes):
                found.recording.restore()

    def decisions(self) -> list[Decision]:
        """Roles for tracing, with the first and the last of every class traced in full."""
        roles = []
        for number, call in enumerate(self.calls):
            members = call.call_class.members if call.call_class else []
            role = call.role
            if role is Role.FIRST and len(members) < MIN_MEMBERS:
                role = Role.PLAIN
            elif role is Role.STUB and len(members) < MIN_MEMBERS:
                role = Role.QUIET
            elif role is Role.STUB and number == members[-1]:
                role = Role.LAST
            roles.append(Decision(call.scope, call.key, role, call.call_class))
        return roles

    def refusals(self) -> list[str]:
        """Why children that look alike are traced in full, one line per reason."""
        lines: dict[str, list[str]] = {}
        for call in self.calls:
            if call.call_class is not None and call.call_class.refused:
                lines.setdefault(call.call_class.refused, []).append(call.scope)
        notes = [f"{', '.join(scopes)} traced in full: {why}" for why, scopes in lines.items()]
        for key, names in self.differences.items():
            if len(names) + 1 >= MIN_MEMBERS:
                scope = next(call.scope for call in self.calls if call.key == key)
                distinct = ", ".join(dict.fromkeys(names))
                notes.append(
                    f"{len(names)} children built like {scope} traced in full: another {distinct}"
                )
        return notes


def describe_results(
    returned: Any, arguments: Sequence[torch.Tensor]
) -> tuple[Results, list[torch.Tensor]]:
    """What a call returned, and the tensors that are new. Raises NotPlainError for results that
    another call could not be given."""
    template, tensors = pack(returned)
    passed = {id(t): k for k, t in enumerate(arguments)}
    storages = {t.untyped_storage()._cdata for t in arguments}
    fresh: list[torch.Tensor] = []
    slots: list[TensorSlot | PassedThrough] = []
    for tensor in tensors:
        if id(tensor) in passed:
            slots.append(PassedThrough(passed[id(tensor)]))
        elif tensor.untyped_storage()._cdata in storages or isinstance(tensor, nn.Parameter):
            raise NotPlainError("a view of an argument or a parameter")
        else:
            slots.append(TensorSlot(len(fresh)))
            fresh.append(tensor)
    results = Results(
        fill_slots(template, slots),
        tuple(map(tensor_facts, fresh)),
        tuple(t.requires_grad for t in fresh),
    )
    return results, fresh


def _fabricate(results: Results, arguments: Sequence[torch.Tensor]) -> Any:
    tensors = empty_results(results.facts)
    for tensor, requires_grad in zip(tensors, results.requires_grad, strict=True):
        tensor.requires_grad_(requires_grad)
    return results.fill(tensors, arguments)
