"""Ops that the user's code defines: custom autograd.Functions, and ops of torch.library.

A Function is called by the name "package.module:Qualified.Name", an op of torch.library as any
other op. What is known of them beyond their name is data of the op itself, CustomOp: there is no
table that one compilation could leave behind for another.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Shape = tuple[int, ...]

OfShapes = Callable[..., float]
"""A number from the local shapes of the operands, one argument each."""

DimNames = tuple[str, ...]
"""A label per dim of a tensor; "" for a dim that is needed unsharded."""


@dataclass(frozen=True)
class CustomCosts:
    """What an op costs on one rank, where its user says so. Work is per call; None: as if it were
    bound by memory, every operand read and every result written once."""

    flops: OfShapes | None = None
    backward_flops: OfShapes | None = None
    num_bytes: OfShapes | None = None
    backward_bytes: OfShapes | None = None
    saved_bytes: OfShapes | None = None
    """What the backward needs, in place of what a probe finds."""

    @property
    def states_work(self) -> bool:
        """Whether anything is said of the work."""
        work = (self.flops, self.backward_flops, self.num_bytes, self.backward_bytes)
        return any(one is not None for one in work)


@dataclass(frozen=True)
class CustomRule:
    """How an op of the user's may be sharded, what it costs and keeps: what meshfold.register_rule
    returns. Made there, where it is checked."""

    target: str
    """The op's name, or "package.module:Name" of a Function."""
    equation: str
    """As it was written: "b s d, d -> b s d"."""
    operands: tuple[DimNames, ...]
    results: tuple[DimNames, ...]
    shards: tuple[str, ...]
    """Labels that ranks may share; one that a result lacks makes that result a pending sum."""
    costs: CustomCosts = CustomCosts()
    fake: Callable[..., Any] | None = None
    """The results, without their numbers, from the arguments: for what cannot run without
    storage."""
    function: object = None
    """The Function itself, or None: two of one name are told apart by it."""


@dataclass(frozen=True)
class CustomOp:
    """What is known of one call of such an op: labels on the dims of operands and results."""

    operands: tuple[DimNames, ...] = ()
    results: tuple[DimNames, ...] = ()
    shards: tuple[str, ...] = ()
    """Without any the op runs unsharded on every rank."""
    is_linear: bool = False
    """Whether the gradients of the operands are linear in those of the results: only then may ranks
    hold summands of them."""
    untrained: frozenset[int] = frozenset()
    """Results that no gradient flows through."""
    costs: CustomCosts = field(default=CustomCosts(), compare=False)
    function: Callable[..., Any] | None = field(default=None, compare=False)
    """What is called: None for an op of torch.library, which its name leads to."""

    @property
    def facts(self) -> tuple[object, ...]:
        """What tells plans of two captures apart."""
        return self.operands, self.results, self.shards, self.is_linear


def is_function(target: str) -> bool:
    """Whether a target is the name of an autograd.Function."""
    return ":" in target
