"""Loops over experts that a graph cannot hold, in a form that it can.

A module that asks which experts were chosen and takes their rows has shapes that depend on values:

    for e in chosen.any(...).nonzero():
        rows = torch.where(chosen[e])
        out[rows] = expert_e(x[rows])

Where a library keeps its experts as one tensor it has a form of fixed shapes to choose
(meshfold.capture.trace.fake_model). Where every expert is a module of its own it has none, and the
fake copy gets one here: weights stacked, gathered by row, multiplied, from which
meshfold.capture.rewrites.expert_linear makes expert_linear. Parameters keep their names.

A form stands for exactly the code that is quoted with it: a module whose code, experts or hooks are
any different keeps its loop, which capture then refuses with its line.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from tokenize import TokenError
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.capture.expert_loops.builds import are_alike, has_only
from meshfold.capture.expert_loops.routed import without_loops_of

_SWITCH = """
def forward(self, hidden_states, selected_experts, routing_weights):
    final_hidden_states = torch.zeros_like(hidden_states)
    expert_mask = selected_experts.permute(2, 1, 0)

    expert_hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero()
    for expert_idx in expert_hit:
        idx, top_x = torch.where(expert_mask[expert_idx].squeeze(0))
        current_state = hidden_states[None, top_x].reshape(-1, hidden_states.shape[-1])
        current_hidden_states = (
            self[f"expert_{expert_idx[0]}"](current_state) * routing_weights[top_x, idx, None]
        )
        final_hidden_states.index_add_(0, top_x, current_hidden_states.to(hidden_states.dtype))
    return final_hidden_states
"""

_SWITCH_EXPERT = """
def forward(self, hidden_states):
    hidden_states = self.wi(hidden_states)
    hidden_states = self.act(hidden_states)
    hidden_states = self.dropout(hidden_states)
    if (
        isinstance(self.wo.weight, torch.Tensor)
        and hidden_states.dtype != self.wo.weight.dtype
        and self.wo.weight.dtype != torch.int8
    ):
        hidden_states = hidden_states.to(self.wo.weight.dtype)
    hidden_states = self.wo(hidden_states)
    return hidden_states
"""


def _switch(module: Any, x: Tensor, selected_experts: Tensor, routing_weights: Tensor) -> Tensor:
    """x [t, k], selected_experts [t, 1, e] with at most one 1 a row, routing_weights [t, 1]
    -> [t, k]; zeros for a row that no expert takes, as of one beyond its expert's capacity."""
    experts = list(module.values())
    chosen = selected_experts.squeeze(1)
    is_routed = chosen.sum(-1) > 0
    # A row that no expert takes must name one: by turns, so that none gets them all.
    turns = torch.arange(x.shape[0], device=x.device) % len(experts)
    ids = torch.where(is_routed, chosen.argmax(-1), turns)
    rows = experts[0].dropout(experts[0].act(_products(experts, "wi", ids, x)))
    y = _products(experts, "wo", ids, rows.to(experts[0].wo.weight.dtype)) * routing_weights
    return y.to(x.dtype).masked_fill(~is_routed.unsqueeze(-1), 0.0)


def _products(experts: list[Any], name: str, ids: Tensor, x: Tensor) -> Tensor:
    """Rows x [t, k] through the linear `name` of their experts, ids [t] -> [t, o]."""
    weights = torch.stack([getattr(expert, name).weight for expert in experts])
    return torch.bmm(weights[ids], x.unsqueeze(-1)).squeeze(-1)


@dataclass(frozen=True)
class _Form:
    """code, expert_code: the forwards of the loop and of its experts; linears: of an expert, each
    without a bias; replacement: takes the module and the arguments of its forward."""

    code: str
    expert_code: str
    linears: tuple[str, ...]
    replacement: Callable[..., Tensor]

    def stands_for(self, module: nn.Module) -> bool:
        """Whether the replacement computes what `module` does."""
        experts = list(module.children())
        return (
            len(experts) > 0
            and list(module._modules) == [f"expert_{k}" for k in range(len(experts))]
            and _same_code(type(module), self.code)
            and _same_code(type(experts[0]), self.expert_code)
            and are_alike(experts)
            and all(has_only(expert, self.linears) for expert in experts)
        )


_FORMS = {
    "transformers.models.switch_transformers.modeling_switch_transformers."
    "SwitchTransformersExperts": _Form(_SWITCH, _SWITCH_EXPERT, ("wi", "wo"), _switch),
}
"""The forms, by the class whose forward is the loop."""


def without_loops(fake: nn.Module) -> tuple[str, ...]:
    """Give modules of `fake` whose loops have a form here that form, by a class of their own;
    returns notes of what differs from the model."""
    types: dict[type, type] = {}
    changed: dict[str, None] = {}
    for module in fake.modules():
        base = type(module)
        form = _FORMS.get(f"{base.__module__}.{base.__qualname__}")
        forward: Callable[..., Any] | None = None
        if form is not None:
            forward = form.replacement if form.stands_for(module) else None
        elif "forward" not in vars(module):
            forward = without_loops_of(module)
        if forward is not None:
            module.__class__ = types.setdefault(base, _with_forward(base, forward))
            changed[base.__name__] = None
    return tuple(
        f"{name}: all experts run in one graph, and one that no row chose gets gradients of zeros, "
        "where the model by itself leaves None"
        for name in changed
    )


def _with_forward(base: Any, forward: Callable[..., Any]) -> type:
    names = {"forward": forward, "__qualname__": base.__qualname__, "__module__": base.__module__}
    return type(base.__name__, (base,), names)


def _same_code(module_type: type, code: str) -> bool:
    """Whether the forward of a class is `code`, but for annotations, docstring and layout."""
    try:
        own = inspect.getsource(module_type.forward)  # type: ignore[attr-defined]
    except (OSError, TypeError, TokenError):
        return False
    return _plain_code(own) == _plain_code(code)


def _plain_code(code: str) -> str:
    """A function's arguments and body, no matter how they are laid out; "" for anything else."""
    try:
        (function,) = ast.parse(textwrap.dedent(code)).body
    except (SyntaxError, ValueError):
        return ""
    if not isinstance(function, ast.FunctionDef) or function.decorator_list:
        return ""
    body = function.body[ast.get_docstring(function) is not None :]
    arguments = [argument.arg for argument in function.args.args]
    return ast.dump(ast.Module([*map(ast.Expr, map(ast.Name, arguments)), *body], []))
