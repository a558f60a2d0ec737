"""Expand call nodes: write the body of the traced member of a class once per call.

A body is what lies between the marks of a traced call. A copy for another instance has its own
values, its own scopes, and its own parameters: those of the same name relative to its scope.
Marks are plain stand-ins for their operand; they are resolved last, so nested calls need no care.

`check_last_members` is the proof: the last member of every class was traced too, and must have the
body that the first one has.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from meshfold.capture.dedup.graph_ops import CALLS, MARK, CallLabel, MarkLabel
from meshfold.capture.trace.failures import RetraceError
from meshfold.capture.trace.fake_model import Names
from meshfold.capture.trace.raw_program import Key, Operand, RawArg, RawOp, RawProgram
from meshfold.ir.op_graph import Source, SourceKind

_COUNT = re.compile(r"@\d+")


@dataclass
class _Body:
    """Ops start..stop-1 of the expanded program, of the call whose scope chain is `stack`.
    inputs: slot of each marked argument; outputs: key of each result; model_call: the call that
    stands for the class."""

    stack: tuple[str, ...]
    model_call: int
    start: int = -1
    stop: int = -1
    inputs: dict[Key, int] = field(default_factory=dict)
    outputs: dict[int, Key] = field(default_factory=dict)

    @property
    def scope(self) -> str:
        return _scope(self.stack)


def expand_calls(program: RawProgram, names: Names) -> RawProgram:
    """The program with every call node replaced by ops and every mark resolved.

    Raises RetraceError if a body uses values that did not come through the arguments, or if the
    last member of a class does not have the body of the first.
    """
    expander = _Expander(program, names)
    for op in program.ops:
        expander.add(op)
    expander.check_last_members()
    return expander.result()


class _Expander:
    def __init__(self, program: RawProgram, names: Names) -> None:
        self.program = program
        self.renaming = _Renaming(names)
        self.ops: list[RawOp] = []
        self.values = dict(program.values)
        self.results: dict[Key, Key] = {}  # of call nodes: what the expanded call makes
        self.marked: dict[Key, Key] = {}
        self.bodies: dict[int, _Body] = {}

    def add(self, op: RawOp) -> None:
        op = rebound(op, lambda key: self.results.get(key, key))
        if op.target in CALLS:
            self._add_call(op)
            return
        if op.target == MARK:
            self._add_mark(op)
        self.ops.append(op)

    def _add_mark(self, op: RawOp) -> None:
        operand, text = op.args
        label = MarkLabel.parse(text)
        (key,) = op.outputs
        self.marked[key] = operand.key
        if label.is_input:
            body = self.bodies.setdefault(label.call, _Body(op.stack, label.model_call))
            body.inputs[key] = label.slot
            body.start = len(self.ops) + 1
            return
        if label.call not in self.bodies:
            raise RetraceError(f"{_scope(op.stack)} does not depend on its arguments")
        body = self.bodies[label.call]
        body.outputs[label.slot] = operand.key
        if body.stop < 0:
            body.stop = len(self.ops)

    def _add_call(self, op: RawOp) -> None:
        operands, text = op.args
        label = CallLabel.parse(text)
        body = self.bodies[label.model_call]
        scope = _scope(op.stack)
        keys: dict[Key, Key] = {key: operands[slot].key for key, slot in body.inputs.items()}

        def renamed(key: Key) -> Key:
            if key not in keys:
                keys[key] = self._renamed_leaf(key, body.scope, scope)
            return keys[key]

        for inner in self.ops[body.start : body.stop]:
            outputs = tuple(f"{key}@{label.call}" for key in inner.outputs)
            expanded = replace(
                rebound(inner, renamed),
                outputs=outputs,
                stack=op.stack + self.renaming.stack(inner.stack, body, scope),
            )
            keys.update(zip(inner.outputs, outputs, strict=True))
            for old, new in zip(inner.outputs, outputs, strict=True):
                self.values[new] = self.values[old]
            if inner.target == MARK:
                self.marked[outputs[0]] = expanded.args[0].key
            self.ops.append(expanded)
        for slot, key in enumerate(op.outputs):
            self.results[key] = renamed(body.outputs[slot])

    def _renamed_leaf(self, key: Key, old_scope: str, new_scope: str) -> Key:
        if not isinstance(key, Source) or key.kind is SourceKind.INPUT:
            raise RetraceError(f"{old_scope} uses a value that is none of its arguments")
        leaf = self.renaming.source(key, old_scope, new_scope)
        self.values.setdefault(leaf, self.values[key])
        return leaf

    def check_last_members(self) -> None:
        for call, body in self.bodies.items():
            if call != body.model_call:
                first = self.bodies[body.model_call]
                if self._form(body) != self._form(first):
                    raise RetraceError(f"{body.scope} runs other ops than {first.scope}")

    def _form(self, body: _Body) -> object:
        """The live ops of a body with its values numbered and its parameters named relative to its
        scope: equal for equal bodies."""
        numbers: dict[Key, object] = {key: ("input", slot) for key, slot in body.inputs.items()}

        def number(key: Key) -> object:
            while key not in numbers and key in self.marked:
                key = self.marked[key]
            if isinstance(key, Source):
                return self.renaming.source(key, body.scope, "")
            return numbers.get(key, key)

        forms = []
        for op in self._live(body):
            for key in op.outputs:
                numbers[key] = ("local", len(numbers))
            results = tuple(self.values[key] for key in op.outputs)
            forms.append((op.target, _form(op.args, number), _form(op.kwargs, number), results))
        return forms, [(slot, number(key)) for slot, key in sorted(body.outputs.items())]

    def _live(self, body: _Body) -> list[RawOp]:
        needed = set(body.outputs.values())
        live = []
        for op in reversed(self.ops[body.start : body.stop]):
            if not needed.isdisjoint(op.outputs):
                needed.update(op.operands)
                if op.target != MARK:
                    live.append(op)
        return live[::-1]

    def result(self) -> RawProgram:
        def final(key: Key) -> Key:
            key = self.results.get(key, key)
            while key in self.marked:
                key = self.marked[key]
            return key

        return RawProgram(
            [rebound(op, final) for op in self.ops if op.target != MARK],
            self.values,
            [(name, final(key)) for name, key in self.program.outputs],
            [(buffer, final(key)) for buffer, key in self.program.mutations],
            self.program.constants,
        )


class _Renaming:
    """Names of one instance from those of another."""

    def __init__(self, names: Names) -> None:
        self.sources = names.sources
        self.names: dict[Source, list[str]] = {}
        for name, source in names.sources.items():
            self.names.setdefault(source, []).append(name)

    def source(self, source: Source, old_scope: str, new_scope: str) -> Source:
        """A parameter or buffer inside the scope becomes the one of that name in the other scope;
        under the scope "" there is none, so it is only named. Anything else is shared."""
        for name in self.names.get(source, ()):
            if name.startswith(old_scope + "."):
                inner = name.removeprefix(old_scope + ".")
                if not new_scope:
                    return Source(source.kind, "." + inner)
                return self.sources[f"{new_scope}.{inner}"]
        return source

    def stack(self, stack: tuple[str, ...], body: _Body, scope: str) -> tuple[str, ...]:
        """The scopes inside the body, as the other instance calls them."""
        inner = stack[len(body.stack) :]
        return tuple(
            scope + path.removeprefix(body.scope) if path.startswith(body.scope + ".") else path
            for path in inner
        )


def rebound(op: RawOp, change: Callable[[Key], Key]) -> RawOp:
    """`op` on other values."""

    def walk(arg: RawArg) -> RawArg:
        if isinstance(arg, Operand):
            return Operand(change(arg.key))
        return tuple(map(walk, arg)) if isinstance(arg, tuple) else arg

    kwargs = tuple((name, walk(arg)) for name, arg in op.kwargs)
    return replace(op, args=tuple(map(walk, op.args)), kwargs=kwargs)


def _form(arg: RawArg, number: Callable[[Key], object]) -> object:
    if isinstance(arg, Operand):
        return "value", number(arg.key)
    if isinstance(arg, tuple):
        return tuple(_form(a, number) for a in arg)
    return type(arg).__name__, repr(arg)


def _scope(stack: tuple[str, ...]) -> str:
    return _COUNT.sub("", stack[-1]) if stack else ""
