"""Ops that stand in the exported graph where children of a stack were called.

    mark(x, label)          x itself, at a boundary of a child that is traced op by op
    call(tensors, label)    a child that was not traced: it equals one that was
    call_one                the same for a child with one result: half the nodes

Labels are JSON, so the ops need no tables of their own. They never run on real tensors.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from meshfold.capture.trace.tensor_facts import empty_results

MARK = "meshfold.mark.default"
CALLS = ("meshfold.call.default", "meshfold.call_one.default")

_library: Any = torch.library  # untyped


@dataclass(frozen=True, slots=True)
class MarkLabel:
    """Tensor argument (is_input) or result number `slot` of call number `call`, which is of the
    class of `model_call`."""

    call: int
    model_call: int
    is_input: bool
    slot: int

    def text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def parse(text: str) -> "MarkLabel":
        return MarkLabel(**json.loads(text))


@dataclass(frozen=True, slots=True)
class CallLabel:
    """Call number `call`, equal to the traced call `model_call`; `results` are shape, strides and
    dtype of each tensor it returns."""

    call: int
    model_call: int
    results: tuple[tuple[tuple[int, ...], tuple[int, ...], str], ...]

    def text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def parse(text: str) -> "CallLabel":
        fields = json.loads(text)
        results = tuple((tuple(s), tuple(t), dtype) for s, t, dtype in fields["results"])
        return CallLabel(fields["call"], fields["model_call"], results)


def _fake_mark(x: torch.Tensor, label: str) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)


def _fake_call(tensors: list[torch.Tensor], label: str) -> list[torch.Tensor]:
    return empty_results(CallLabel.parse(label).results)


def _fake_call_one(tensors: list[torch.Tensor], label: str) -> torch.Tensor:
    (result,) = empty_results(CallLabel.parse(label).results)
    return result


_library.define("meshfold::mark", "(Tensor x, str label) -> Tensor")
_library.define("meshfold::call", "(Tensor[] tensors, str label) -> Tensor[]")
_library.define("meshfold::call_one", "(Tensor[] tensors, str label) -> Tensor")
_library.register_fake("meshfold::mark", _fake_mark)
_library.register_fake("meshfold::call", _fake_call)
_library.register_fake("meshfold::call_one", _fake_call_one)


def mark(x: torch.Tensor, label: MarkLabel) -> torch.Tensor:
    """Put a mark into the graph being traced."""
    marked: torch.Tensor = torch.ops.meshfold.mark(x, label.text())
    return marked


def call(tensors: Sequence[torch.Tensor], label: CallLabel) -> list[torch.Tensor]:
    """Put a call node into the graph being traced."""
    if len(label.results) == 1:
        return [torch.ops.meshfold.call_one(list(tensors), label.text())]
    results: list[torch.Tensor] = torch.ops.meshfold.call(list(tensors), label.text())
    return results
