"""Experts whose weights are one tensor and whose rows are grouped by values: JetMoE sorts rows and
splits them by how many each expert has, LongCat loops over experts of which some are the identity.
In the forms here every row is multiplied with the weights of its expert, in the order of the rows.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from meshfold.capture.expert_loops.builds import has_hooks
from meshfold.capture.expert_loops.quoted import Form

_JET_GATING = """
def forward(self, hidden_states):
    logits = self.layer(hidden_states).float()
    top_k_logits, top_k_indices = logits.topk(self.top_k, dim=1)
    top_k_gates = torch.softmax(top_k_logits, dim=1).type_as(hidden_states)
    zeros = torch.zeros(
        [top_k_gates.size(0), self.num_experts],
        dtype=top_k_gates.dtype,
        device=top_k_gates.device,
    )
    gates = zeros.scatter(1, top_k_indices, 1)
    expert_size = gates.long().sum(0)
    expert_size = expert_size.tolist()
    top_k_experts = top_k_indices.flatten()
    _, index_sorted_experts = top_k_experts.sort(0)
    batch_index = index_sorted_experts.div(self.top_k, rounding_mode="trunc")
    top_k_gates = top_k_gates.flatten()
    batch_gates = top_k_gates[index_sorted_experts]
    return (index_sorted_experts, batch_index, batch_gates, expert_size, logits)
"""

_JET_LINEARS = """
def forward(self, inputs, expert_size):
    input_list = inputs.split(expert_size, dim=0)
    output_list = []
    for i in range(self.num_experts):
        output_list.append(F.linear(input_list[i], self.weight[i]))
    results = torch.cat(output_list, dim=0)
    return results
"""

_JET_FORWARD = """
def forward(self, layer_input):
    bsz, length, emb_size = layer_input.size()
    layer_input = layer_input.reshape(-1, emb_size)
    _, batch_index, batch_gates, expert_size, router_logits = self.router(layer_input)
    expert_inputs = layer_input[batch_index]
    hidden_states = self.input_linear(expert_inputs, expert_size)
    chunked_hidden_states = hidden_states.chunk(2, dim=-1)
    hidden_states = self.activation(chunked_hidden_states[0]) * chunked_hidden_states[1]
    expert_outputs = self.output_linear(hidden_states, expert_size)
    expert_outputs = expert_outputs * batch_gates[:, None]
    zeros = torch.zeros(
        (bsz * length, self.input_size), dtype=expert_outputs.dtype, device=expert_outputs.device
    )
    layer_output = zeros.index_add(0, batch_index, expert_outputs)
    layer_output = layer_output.view(bsz, length, self.input_size)
    layer_output = layer_output + self.bias
    return layer_output
"""

_JET_MAP = """
def map(self, layer_input):
    bsz, length, emb_size = layer_input.size()
    layer_input = layer_input.reshape(-1, emb_size)
    index_sorted_experts, batch_index, batch_gates, expert_size, router_logits = self.router(
        layer_input
    )
    topo_info = (index_sorted_experts, batch_index, batch_gates, expert_size)
    expert_inputs = layer_input[batch_index]
    expert_outputs = self.input_linear(expert_inputs, expert_size)
    zeros = torch.zeros(
        (bsz * length * self.top_k, self.hidden_size),
        dtype=expert_outputs.dtype,
        device=expert_outputs.device,
    )
    layer_output = zeros.index_add(0, index_sorted_experts, expert_outputs)
    layer_output = layer_output.view(bsz, length, self.top_k, -1)
    return (layer_output, router_logits, topo_info)
"""

_JET_REDUCE = """
def reduce(self, layer_input, topo_info):
    bsz, length, k, hidden_size = layer_input.size()
    layer_input = layer_input.reshape(-1, hidden_size)
    index_sorted_experts, batch_index, batch_gates, expert_size = topo_info
    expert_inputs = layer_input[index_sorted_experts]
    expert_outputs = self.output_linear(expert_inputs, expert_size)
    expert_outputs = expert_outputs * batch_gates[:, None]
    zeros = torch.zeros(
        (bsz * length, self.input_size), dtype=expert_outputs.dtype, device=expert_outputs.device
    )
    layer_output = zeros.index_add(0, batch_index, expert_outputs)
    layer_output = layer_output.view(bsz, length, self.input_size)
    layer_output = layer_output + self.bias
    return layer_output
"""

_LONGCAT = """
def forward(self, hidden_states, top_k_index, top_k_weights):
    final_hidden_states = torch.zeros_like(hidden_states)
    if top_k_index.numel() == 0:
        return final_hidden_states
    expert_mask = torch.nn.functional.one_hot(
        top_k_index, num_classes=self.total_experts
    ).permute(2, 1, 0)
    expert_hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero(as_tuple=False)
    for expert_idx_tensor in expert_hit:
        expert_idx = int(expert_idx_tensor.item())
        selection_idx, token_idx = torch.where(expert_mask[expert_idx].squeeze(0))
        if token_idx.numel() == 0:
            continue
        current_state = hidden_states[token_idx]
        if expert_idx >= self.num_routed_experts or self.gate_up_proj is None:
            current_hidden_states = self.identity_expert(current_state)
        else:
            gate, up = F.linear(current_state, self.gate_up_proj[expert_idx]).chunk(2, dim=-1)
            current_hidden_states = self.act_fn(gate) * up
            current_hidden_states = F.linear(current_hidden_states, self.down_proj[expert_idx])
        current_hidden_states = (
            current_hidden_states * top_k_weights[token_idx, selection_idx, None]
        )
        final_hidden_states.index_add_(
            0, token_idx, current_hidden_states.to(hidden_states.dtype)
        )
    return final_hidden_states
"""


def _products(weights: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    """Rows x [t, k] through the weights [e, o, k] of their experts, ids [t] -> [t, o]."""
    return torch.bmm(weights[ids], x.unsqueeze(-1)).squeeze(-1)


def _by_place(x: Tensor, num_places: int) -> Tensor:
    """x [t, d] -> [t * k, d]: a row for each of its places."""
    return x.unsqueeze(1).expand(-1, num_places, -1).reshape(-1, x.shape[-1])


def _jet_gating(self: Any, hidden_states: Tensor) -> tuple[Tensor, ...]:
    """What the model's own gives, but with the numbers of rows as a tensor."""
    logits = self.layer(hidden_states).float()
    ids, gates = _jet_chosen(self, logits, hidden_states)
    zeros = torch.zeros(gates.shape[0], self.num_experts, dtype=gates.dtype, device=gates.device)
    sizes = zeros.scatter(1, ids, 1).long().sum(0)
    order = ids.flatten().sort(0)[1]
    rows = order.div(self.top_k, rounding_mode="trunc")
    return order, rows, gates.flatten()[order], sizes, logits


def _jet_chosen(router: Any, logits: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The experts of each row [t, k], and their gates [t, k]."""
    chosen, ids = logits.topk(router.top_k, dim=1)
    return ids, torch.softmax(chosen, dim=1).type_as(x)


def _jet_forward(self: Any, layer_input: Tensor) -> Tensor:
    rows = layer_input.reshape(-1, layer_input.shape[-1])
    ids, gates = _jet_chosen(self.router, self.router(rows)[-1], rows)
    hidden = _products(self.input_linear.weight, ids.flatten(), _by_place(rows, ids.shape[1]))
    gate, up = hidden.chunk(2, dim=-1)
    made = _products(self.output_linear.weight, ids.flatten(), self.activation(gate) * up)
    bias: Tensor = self.bias
    return _jet_sums(made, gates, layer_input) + bias


def _jet_sums(made: Tensor, gates: Tensor, like: Tensor) -> Tensor:
    """made [t * k, d], gates [t, k] -> [b, s, d]"""
    weighted = made.reshape(*gates.shape, made.shape[-1]) * gates.unsqueeze(-1)
    return weighted.sum(1).reshape(*like.shape[:2], made.shape[-1])


def _jet_map(self: Any, layer_input: Tensor) -> tuple[Tensor, Tensor, Any]:
    rows = layer_input.reshape(-1, layer_input.shape[-1])
    logits = self.router(rows)[-1]
    ids, gates = _jet_chosen(self.router, logits, rows)
    made = _products(self.input_linear.weight, ids.flatten(), _by_place(rows, ids.shape[1]))
    return made.reshape(*layer_input.shape[:2], ids.shape[1], -1), logits, (ids, gates)


def _jet_reduce(self: Any, layer_input: Tensor, topo_info: tuple[Tensor, Tensor]) -> Tensor:
    ids, gates = topo_info
    rows = layer_input.reshape(-1, layer_input.shape[-1])
    made = _products(self.output_linear.weight, ids.flatten(), rows)
    bias: Tensor = self.bias
    return _jet_sums(made, gates, layer_input) + bias


def _is_jet(module: Any) -> bool:
    linears = (module.input_linear, module.output_linear)
    return not any(has_hooks(linear) for linear in linears) and all(
        linear.weight.shape[0] == linear.num_experts == module.router.num_experts
        for linear in linears
    )


def _longcat(self: Any, hidden_states: Tensor, top_k_index: Tensor, weights: Tensor) -> Tensor:
    ids, num_routed = top_k_index.reshape(-1), self.num_routed_experts
    rows = _by_place(hidden_states, top_k_index.shape[1])
    of_routed = ids.clamp(max=num_routed - 1)
    gate, up = _products(self.gate_up_proj, of_routed, rows).chunk(2, dim=-1)
    made = _products(self.down_proj, of_routed, self.act_fn(gate) * up)
    made = torch.where((ids >= num_routed).unsqueeze(-1), rows, made) * weights.reshape(-1, 1)
    made = made.to(hidden_states.dtype).reshape(*top_k_index.shape, hidden_states.shape[-1])
    return made.sum(1)


def _is_longcat(module: Any) -> bool:
    return module.num_routed_experts > 0 and not has_hooks(module.identity_expert)


_JET_PARTS: Mapping[str, str] = {
    "router.forward": _JET_GATING,
    "input_linear.forward": _JET_LINEARS,
    "output_linear.forward": _JET_LINEARS,
}
_JET = "transformers.models.jetmoe.modeling_jetmoe."
GROUPED_FORMS = {
    f"{_JET}JetMoeMoE": Form(
        {"forward": _JET_FORWARD, **_JET_PARTS},
        {"forward": _jet_forward, "router.forward": _jet_gating},
        _is_jet,
    ),
    f"{_JET}JetMoeMoA": Form(
        {"map": _JET_MAP, "reduce": _JET_REDUCE, **_JET_PARTS},
        {"map": _jet_map, "reduce": _jet_reduce, "router.forward": _jet_gating},
        _is_jet,
    ),
    "transformers.models.longcat_flash.modeling_longcat_flash.LongcatFlashExperts": Form(
        {"forward": _LONGCAT}, {"forward": _longcat}, _is_longcat
    ),
}
"""The forms, by the class whose methods group the rows."""
