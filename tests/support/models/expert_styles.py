"""Experts as people write them: one mixture of experts in the usual styles of loops."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCH, TOKENS, WIDTH, EXPERTS, CHOSEN = 4, 6, 8, 4, 2


class Expert(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, 2 * WIDTH, bias=bias)
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=bias)
        self.w3 = nn.Linear(WIDTH, 2 * WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return made


class Style(nn.Module):
    """x [b, s, d] -> [b, s, d]"""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert(bias) for _ in range(EXPERTS))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and ids [..., k]."""
        weights, ids = torch.topk(self.gate(x).softmax(-1), CHOSEN, dim=-1)
        return weights / weights.sum(-1, keepdim=True), ids


class OneHot(Style):
    """Mixtral, as it was first written."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        batch_size, sequence_length, hidden_dim = hidden_states.shape
        hidden_states = hidden_states.view(-1, hidden_dim)
        routing_weights, selected_experts = self.route(hidden_states)
        final_hidden_states = torch.zeros(
            (batch_size * sequence_length, hidden_dim), dtype=hidden_states.dtype
        )
        expert_mask = F.one_hot(selected_experts, num_classes=self.num_experts).permute(2, 1, 0)
        for expert_idx in range(self.num_experts):
            expert_layer = self.experts[expert_idx]
            idx, top_x = torch.where(expert_mask[expert_idx])
            current_state = hidden_states[None, top_x].reshape(-1, hidden_dim)
            current_hidden_states = expert_layer(current_state) * routing_weights[top_x, idx, None]
            final_hidden_states.index_add_(0, top_x, current_hidden_states.to(hidden_states.dtype))
        return final_hidden_states.reshape(batch_size, sequence_length, hidden_dim)


class Hits(Style):
    """The same over experts that have rows."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        shape = hidden_states.shape
        hidden_states = hidden_states.view(-1, shape[-1])
        routing_weights, selected_experts = self.route(hidden_states)
        final = torch.zeros_like(hidden_states)
        expert_mask = F.one_hot(selected_experts, num_classes=self.num_experts).permute(2, 1, 0)
        expert_hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero()
        for expert_idx in expert_hit:
            expert_layer = self.experts[expert_idx]
            idx, top_x = torch.where(expert_mask[expert_idx].squeeze(0))
            current_state = hidden_states[None, top_x].reshape(-1, shape[-1])
            current_hidden_states = expert_layer(current_state) * routing_weights[top_x, idx, None]
            final.index_add_(0, top_x, current_hidden_states.to(hidden_states.dtype))
        return final.reshape(shape)


class Where(Style):
    """mistral-inference, by an author who does not write `self`."""

    def forward(module, inputs: Tensor) -> Tensor:
        flat = inputs.view(-1, inputs.shape[-1])
        weights, selected_experts = module.route(flat)
        results = torch.zeros_like(flat)
        for i, expert in enumerate(module.experts):
            batch_idx, nth_expert = torch.where(selected_experts == i)
            results[batch_idx] += weights[batch_idx, nth_expert, None] * expert(flat[batch_idx])
        return results.view_as(inputs)


class Counted(Style):
    """DeepSeek-V3."""

    def forward(self, x: Tensor) -> Tensor:
        shape = x.size()
        x = x.view(-1, shape[-1])
        weights, indices = self.route(x)
        y = torch.zeros_like(x)
        counts = torch.bincount(indices.flatten(), minlength=self.num_experts).tolist()
        for i in range(len(self.experts)):
            if counts[i] == 0:
                continue
            expert = self.experts[i]
            idx, top = torch.where(indices == i)
            y[idx] += expert(x[idx]) * weights[idx, top, None]
        return y.view(shape)


class Repeated(Style):
    """DeepSeek-V2, in training."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        orig_shape = hidden_states.shape
        topk_weight, topk_idx = self.route(hidden_states.view(-1, orig_shape[-1]))
        hidden_states = hidden_states.view(-1, hidden_states.shape[-1])
        flat_topk_idx = topk_idx.view(-1)
        hidden_states = hidden_states.repeat_interleave(CHOSEN, dim=0)
        y = torch.empty_like(hidden_states)
        for i, expert in enumerate(self.experts):
            y[flat_topk_idx == i] = expert(hidden_states[flat_topk_idx == i])
        y = (y.view(*topk_weight.shape, -1) * topk_weight.unsqueeze(-1)).sum(dim=1)
        return y.view(*orig_shape)


class Masked(Style):
    """makeMoE: probabilities by expert, masks of tokens."""

    def forward(self, x: Tensor) -> Tensor:
        weights, indices = self.route(x)
        gating_output = torch.zeros_like(self.gate(x)).scatter(-1, indices, weights)
        final_output = torch.zeros_like(x)
        flat_x = x.view(-1, x.size(-1))
        flat_gating_output = gating_output.view(-1, gating_output.size(-1))
        flat_indices = indices.view(-1, CHOSEN)
        flat_output = final_output.view(-1, x.size(-1))
        for i, expert in enumerate(self.experts):
            flat_mask = (flat_indices == i).any(dim=-1)
            if flat_mask.any():
                expert_input = flat_x[flat_mask]
                expert_output = expert(expert_input)
                gating_scores = flat_gating_output[flat_mask, i].unsqueeze(1)
                weighted_output = expert_output * gating_scores
                flat_output[flat_mask] += weighted_output
        return flat_output.view_as(x)


class Unique(Style):
    """Over the experts that occur, by masks of a token's choices; three dims."""

    def forward(self, x: Tensor) -> Tensor:
        weights, topk_idx = self.route(x)
        out = torch.zeros_like(x)
        for e in topk_idx.unique():
            b, s, k = torch.where(topk_idx == e)
            out[b, s] = out[b, s] + self.experts[e](x[b, s]) * weights[b, s, k].unsqueeze(-1)
        return out


class Switch(Style):
    """One expert a token, by nonzero; the weight comes afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        prob, routes = torch.max(self.gate(flat).softmax(-1), dim=-1)
        final = flat.new_zeros(flat.shape)
        for i in range(self.num_experts):
            rows = torch.eq(routes, i).nonzero(as_tuple=True)[0]
            if rows.numel() == 0:
                continue
            final[rows, :] = self.experts[i](flat[rows, :])
        return (final * prob.unsqueeze(-1)).view_as(x)


STYLES: tuple[type[Style], ...] = (
    OneHot,
    Hits,
    Where,
    Counted,
    Repeated,
    Masked,
    Unique,
    Switch,
)


class Mixture(nn.Module):
    """Two layers of a style, and a loss."""

    def __init__(self, style: type[Style], **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(style(**options) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def mixture(style: type[Style], **options: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model in float64 and a batch."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Mixture(style, **options).double()
        return model, {"x": torch.randn(BATCH, TOKENS, WIDTH, dtype=torch.float64)}
