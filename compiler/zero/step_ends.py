"""The first and the last autograd node of a step (meshfold.zero.step)."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshfold.zero.step import GroupUse, TrainingStep


def enter(step: TrainingStep) -> None:
    """Create the oldest autograd node of the step and hand out the tokens."""
    trained = step.trained()
    if not (step.is_recording and trained):
        return
    shards = list({id(s): s for u in trained for s in u.shards}.values())
    tokens = _Enter.apply(step, trained, *shards)  # type: ignore[no-untyped-call]
    for use, token in zip(trained, tokens, strict=True):
        use.token = token


def leave(step: TrainingStep, outputs: Sequence[Tensor]) -> list[Tensor]:
    """Wrap the outputs: their backward is the first to run."""
    if not (trained := [x for x in outputs if x.requires_grad]):
        return list(outputs)
    wrapped = iter(_Leave.apply(step, *trained))  # type: ignore[no-untyped-call]
    return [next(wrapped) if x.requires_grad else x for x in outputs]


def new_token(shard: Tensor) -> Tensor:
    """A token, and what stands for its gradient: on the device of parameters, so that one autograd
    thread runs the whole backward, and of one dtype, since some are complex beside others."""
    return shard.new_empty(0, dtype=torch.float32)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, step: TrainingStep, uses: list[GroupUse], *shards: Tensor
    ) -> tuple[Tensor, ...]:
        # Weak: its uses hold tokens made here, in a cycle that no garbage collector sees.
        ctx.step = weakref.ref(step)
        ctx.shards = {id(s): k for k, s in enumerate(shards)}
        ctx.set_materialize_grads(False)
        return tuple(new_token(shards[0]) for _ in uses)

    @staticmethod
    def backward(ctx: Any, *tokens: Tensor | None) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] = [None] * len(ctx.shards)
        step: TrainingStep = ctx.step()
        for use, found in zip(step.trained(), step.finish_reductions(), strict=True):
            for shard, gradient in zip(use.shards, found or (), strict=found is not None):
                if gradient is None:
                    continue
                k = ctx.shards[id(shard)]
                before = gradients[k]
                gradients[k] = gradient if before is None else before + gradient
        step.finish_backward()
        return None, None, *gradients


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: TrainingStep, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.step = step
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.step.begin_backward()
        if ctx.step.context.deferred is not None:
            ctx.step.context.deferred.note_step(ctx.step)
        return None, *gradients
