"""Comparisons that run on the ranks of a pool."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from meshfold.codegen.program.emitted import PLACE
from meshfold.models.from_argument import BuiltModel
from meshfold.training.compiled_model import CompiledModel
from meshfold.validation import verify


def compare(plan_text: str, model: str) -> Any:
    return verify._compare(lambda _: None, plan_text, model)


def compare_a_wrong_program(plan_text: str, model: str, name: str) -> Any:
    """Compare with the gradient of one parameter off by a millionth."""

    def spoil(compiled: CompiledModel) -> None:
        compiled.get_parameter(name).register_hook(lambda g: None if g is None else g * (1 + 1e-6))

    return _compare_spoiled(plan_text, model, spoil)


def _compare_spoiled(plan_text: str, model: str, spoil: Callable[[CompiledModel], None]) -> Any:
    right = verify.bind

    def wrong(*args: Any, **kwargs: Any) -> CompiledModel:
        compiled = right(*args, **kwargs)
        spoil(compiled)
        return compiled

    verify.bind = wrong
    try:
        return compare(plan_text, model)
    finally:
        verify.bind = right


def compare_a_wrong_capture(plan_text: str, model: str, name: str) -> Any:
    """Compare with a model that computes something else than what was captured of it."""
    right = verify._take_from_first_rank

    def wrong(built: BuiltModel) -> None:
        right(built)
        module = built.model.get_submodule(name)
        module.register_forward_hook(lambda module, args, output: output * (1 + 1e-6))

    verify._take_from_first_rank = wrong
    try:
        return compare(plan_text, model)
    finally:
        verify._take_from_first_rank = right


class _Skewed(torch.autograd.Function):
    """Off by a millionth in one direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, is_backward: bool) -> Tensor:
        ctx.is_backward = is_backward
        return x.clone() if is_backward else x * (1 + 1e-6)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * (1 + 1e-6 * ctx.is_backward), None


def skew(x: Tensor, is_backward: bool) -> Tensor:
    return _Skewed.apply(x, is_backward)  # type: ignore[no-any-return,no-untyped-call]


def _skew_after(node: fx.Node, is_backward: bool) -> None:
    with node.graph.inserting_after(node):
        skewed = node.graph.call_function(skew, (node, is_backward))
    node.replace_all_uses_with(skewed, delete_user_cb=lambda user: user is not skewed)
    skewed.meta[PLACE] = node.meta.pop(PLACE)


def compare_with_a_wrong_op(
    plan_text: str, model: str, name: str, direction: str = "forward"
) -> Any:
    """Compare with the value or the gradient of one emitted op off by a millionth."""

    def spoil(compiled: CompiledModel) -> None:
        for region in compiled.program.regions:
            for node in list(region.graph.graph.nodes):
                if name in node.name and PLACE in node.meta:
                    _skew_after(node, direction == "backward")
            region.graph.recompile()

    return _compare_spoiled(plan_text, model, spoil)
