"""Custom autograd.Functions: a call of one is one op of the graph, with its own backward.

While the model is traced, Function.apply puts an op `meshfold::function` into the graph, whose
label says which call it stands for and what that returns. What it returns is found by running the
Function on tensors without storage, out of the sight of the trace: nothing in it is traced, and its
backward stays the user's code. Refused, with the line: what draws random numbers, what changes an
argument in place, and what cannot run without storage unless a rule says what it returns.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode

from meshfold.capture.trace.tensor_facts import TensorFacts, empty_results, tensor_facts
from meshfold.errors import CaptureError
from meshfold.ir.custom_ops import CustomRule
from meshfold.ops.functions import FunctionOp, packed
from meshfold.torch_compat.autograd_functions import gradients_on_fakes, outside_of_tracing
from meshfold.torch_compat.fake_tensors import fake_mode
from meshfold.torch_compat.pytree import TensorSlot, fill_slots, map_leaves, map_named
from meshfold.torch_compat.source_lines import definition

FUNCTION = "meshfold.function.default"

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_library: Any = torch.library  # untyped


@dataclass(frozen=True)
class FunctionCall:
    """One call. `arguments`, `results`: templates with a TensorSlot per tensor. `facts`: of the
    tensors that it returns; `trained`: which of them have a gradient. `untrained`: tensors among
    the arguments that get no gradient."""

    op: FunctionOp
    arguments: Any
    results: Any
    facts: tuple[TensorFacts, ...]
    trained: tuple[bool, ...]
    untrained: frozenset[int]


def _label(number: int, call: FunctionCall) -> str:
    return json.dumps({"call": number, "results": call.facts})


def call_number(label: str) -> int:
    """Number of the call that an op of the traced graph stands for."""
    return int(json.loads(label)["call"])


def _fake_function(tensors: list[torch.Tensor], label: str) -> list[torch.Tensor]:
    return empty_results(json.loads(label)["results"])


_library.define("meshfold::function", "(Tensor[] tensors, str label) -> Tensor[]")
_library.register_fake("meshfold::function", _fake_function)


class FunctionCalls:
    """The distinct calls of Functions that a model makes, each found once. rules: of the user."""

    def __init__(self, rules: Sequence[CustomRule] = ()) -> None:
        self.calls: list[FunctionCall] = []
        self._fakes = {rule.function: rule.fake for rule in rules if rule.fake is not None}
        self._ops: dict[type[Function], FunctionOp] = {}
        self._known: dict[object, int] = {}

    def on_call(self, function: type[Function], args: tuple[Any, ...]) -> Any:
        """What takes the place of function.apply(*args) in the graph being traced."""
        op = self._op(function)
        tensors: list[torch.Tensor] = []

        def strip(path: str, leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                # Autograd does not look for tensors inside of containers.
                tensors.append(leaf.detach() if "." in path else leaf)
                return TensorSlot(len(tensors) - 1)
            if not isinstance(leaf, _PLAIN):
                raise CaptureError(
                    f"{op.__name__} is called with a {type(leaf).__name__}, which a graph cannot "
                    "hold; pass tensors, numbers, strings and dtypes to an autograd.Function",
                    op=op.__name__,
                    source=definition(function),
                )
            return leaf

        arguments = packed(map_named(strip, args))
        key = (
            function,
            repr(arguments),
            tuple((tensor_facts(t), t.requires_grad) for t in tensors),
            torch.is_grad_enabled(),
        )
        if key not in self._known:
            self.calls.append(self._found(op, arguments, tensors))
            self._known[key] = len(self.calls) - 1  # not before: it may raise, and be asked again
        number = self._known[key]
        call = self.calls[number]
        given = [t.detach() if k in call.untrained else t for k, t in enumerate(tensors)]
        results = torch.ops.meshfold.function(given, _label(number, call))
        marked = [
            x if trained or not x.requires_grad else x.detach()
            for x, trained in zip(results, call.trained, strict=True)
        ]
        return fill_slots(call.results, marked)

    def _op(self, function: type[Function]) -> FunctionOp:
        """Functions of one name, as those of a local scope can be, are numbered."""
        if function not in self._ops:
            name = f"{function.__module__}:{function.__qualname__}"
            others = sum(op.__name__.partition("#")[0] == name for op in self._ops.values())
            name = f"{name}#{others + 1}" if others else name
            self._ops[function] = FunctionOp(function, name, self._fakes.get(function))
        return self._ops[function]

    def _found(
        self, op: FunctionOp, arguments: Any, tensors: Sequence[torch.Tensor]
    ) -> FunctionCall:
        facts = [tensor_facts(t) for t in tensors]
        with outside_of_tracing(), fake_mode():
            leaves = empty_results(facts)
            for leaf, tensor in zip(leaves, tensors, strict=True):
                leaf.requires_grad_(tensor.requires_grad)
            # No leaves: those may not be changed in place, which is for the message below to say.
            fakes = [leaf.clone() for leaf in leaves]
            returned = self._returned(op, fill_slots(arguments, fakes))
            made: list[torch.Tensor] = []

            def strip(leaf: Any) -> Any:
                if not isinstance(leaf, torch.Tensor):
                    return leaf
                made.append(leaf)
                return TensorSlot(len(made) - 1)

            results = map_leaves(strip, returned)
            if any(fake._version for fake in fakes):
                raise _refusal(
                    op,
                    "changes an argument in place; let it work on a copy, or return a new tensor",
                )
            return FunctionCall(
                op,
                arguments,
                results,
                tuple(map(tensor_facts, made)),
                tuple(x.requires_grad for x in made),
                _untrained(made, fakes),
            )

    def _returned(self, op: FunctionOp, args: Any) -> Any:
        """What the Function returns on tensors without storage."""
        draws = _Draws()
        try:
            with draws:
                returned = op.without_storage(*args)
        except Exception as error:
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            raise _refusal(
                op,
                f"cannot run on tensors without storage: {reason}; say what it returns, with "
                "meshfold.register_rule(..., fake=...)",
            ) from error
        if draws.found:
            raise _refusal(
                op,
                "draws random numbers, which ranks would not agree on; draw outside of it and pass "
                "the numbers in",
            )
        return returned


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Whether an op that runs inside draws random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.found = self.found or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _untrained(made: Sequence[torch.Tensor], fakes: Sequence[torch.Tensor]) -> frozenset[int]:
    """Arguments whose gradient is None, as far as the backward runs without storage."""
    results = [x for x in made if x.requires_grad]
    wanted = [k for k, fake in enumerate(fakes) if fake.requires_grad]
    if not (results and wanted):
        return frozenset()
    try:
        found = gradients_on_fakes(results, [fakes[k] for k in wanted])
    except Exception:  # it looks at values, or launches a kernel: real tensors will tell
        return frozenset()
    return frozenset(k for k, gradient in zip(wanted, found, strict=True) if gradient is None)


def _refusal(op: FunctionOp, reason: str) -> CaptureError:
    return CaptureError(
        f"{op.__name__} is a torch.autograd.Function that {reason}",
        op=op.__name__,
        source=definition(op.function),
    )
