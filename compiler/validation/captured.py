"""The captured program of a model that a plan was made for."""

import math
from collections.abc import Iterable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from meshfold.api import check_fingerprint
from meshfold.capture.known_values.fixed_inputs import fixed_by
from meshfold.capture.pipeline import Captured, capture
from meshfold.ir.op_graph import SlotKind, Source, SourceKind
from meshfold.ir.plan import Plan
from meshfold.models.from_argument import BuiltModel


def captured_as_planned(plan: Plan, built: BuiltModel) -> Captured:
    """The captured model. Raises PlanMismatchError if it is not the one that was planned."""
    captured = captured_alike(plan, built)
    check_fingerprint(plan, captured)
    return captured


def captured_alike(plan: Plan, built: BuiltModel) -> Captured:
    """Any model, captured as the one that was planned."""
    return capture(
        built.model,
        built.example_inputs,
        precision=plan.precision,
        returns=plan.model.returns,
        loss_fn=built.loss_fn,
        rules=built.rules,
        fixed_inputs=fixed_by(plan, built.example_inputs),
    )


ROUNDING = 1e-5
"""Relative, of numbers that float32 rounds, with room for what is computed of them."""


def rounded_alike(some: Captured, other: Captured) -> bool:
    """Whether two captures are of one program but for rounding: numbers that forward computes with
    torch and reads back (torch.linspace(0, 1, 4).tolist()), and constants made so, are those of the
    dtype that they were captured in."""

    def values(captured: Captured, sources: Iterable[Source]) -> list[Tensor]:
        return [captured.constants[s.name] for s in sources if s.kind is SourceKind.CONSTANT]

    def named(of: Any) -> Any:
        return replace(of, name="") if getattr(of, "kind", None) in _CONSTANT else of

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, float) and isinstance(b, float):
            return math.isclose(a, b, rel_tol=ROUNDING) or a != a and b != b
        if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
            return len(a) == len(b) and all(map(same, a, b))
        if is_dataclass(a) and type(a) is type(b):
            a, b = named(a), named(b)
            return all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
        return bool(a == b)

    graphs = some.graph, other.graph
    if not all(same(*(getattr(g, name) for g in graphs)) for name in _PROGRAM):
        return False
    return all(
        torch.allclose(a, b.to(a.dtype), rtol=ROUNDING, equal_nan=True)
        for one, two in zip(some.graph.instances, other.graph.instances, strict=True)
        for a, b in zip(values(some, one.sources), values(other, two.sources), strict=True)
    )


_PROGRAM = ("regions", "instances", "parameters", "buffers", "inputs", "outputs")
_CONSTANT = (SourceKind.CONSTANT, SlotKind.CONSTANT)
