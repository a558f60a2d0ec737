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

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.capture.expert_loops.builds import are_alike, has_only
from meshfold.capture.expert_loops.grouped import GROUPED_FORMS
from meshfold.capture.expert_loops.quoted import Form, by_module, same_code
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


def _is_switch(module: nn.Module) -> bool:
    experts = list(module.children())
    return (
        len(experts) > 0
        and list(module._modules) == [f"expert_{k}" for k in range(len(experts))]
        and same_code(experts[0], "forward", _SWITCH_EXPERT)
        and are_alike(experts)
        and all(has_only(expert, ("wi", "wo")) for expert in experts)
    )


_FORMS = {
    "transformers.models.switch_transformers.modeling_switch_transformers."
    "SwitchTransformersExperts": Form({"forward": _SWITCH}, {"forward": _switch}, _is_switch),
    **GROUPED_FORMS,
}
"""The forms, by the class whose methods are the loop."""


def without_loops(fake: nn.Module) -> tuple[str, ...]:
    """Give modules of `fake` whose loops have a form here that form, by a class of their own;
    returns notes of what differs from the model."""
    types: dict[type, type] = {}
    changed: dict[str, None] = {}
    for module in fake.modules():
        base = type(module)
        form = _FORMS.get(f"{base.__module__}.{base.__qualname__}")
        methods: Mapping[str, Callable[..., Any]] = {}
        if form is not None:
            methods = form.methods if form.stands_for(module) else {}
        elif "forward" not in vars(module):
            forward = without_loops_of(module)
            methods = {} if forward is None else {"forward": forward}
        for path, own in by_module(methods).items():
            part = module.get_submodule(path)
            part.__class__ = types.setdefault(type(part), _with_methods(type(part), own))
        if methods:
            changed[base.__name__] = None
    return tuple(
        f"{name}: all experts run in one graph, and one that no row chose gets gradients of zeros, "
        "where the model by itself leaves None"
        for name in changed
    )


def _with_methods(base: Any, methods: Mapping[str, Callable[..., Any]]) -> type:
    names = {**methods, "__qualname__": base.__qualname__, "__module__": base.__module__}
    return type(base.__name__, (base,), names)
