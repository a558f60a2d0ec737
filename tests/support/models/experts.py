"""Mixtures of experts with a capacity, written the ways users write them: tokens beyond what an
expert has room for are dropped, and all shapes are fixed.

    gshard      groups of tokens (rows of the batch), top 2, one-hot dispatch and combine by einsum
    switch      all tokens one group, top 1, rows added into a buffer [experts * capacity, width]
    buffers     all tokens one group, top 1, rows put into a buffer [experts, capacity + 1, width]
    prototypes  M6-T: several sets of experts, the best of each, their outputs added
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, SEQUENCE, WIDTH, HIDDEN, EXPERTS, VOCABULARY = 8, 8, 16, 32, 8, 32


class Experts(nn.Module):
    """Two products with the weights of every expert on its own rows."""

    def __init__(self, width: int, hidden: int, num_experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(num_experts, width, hidden) * width**-0.5)
        self.down = nn.Parameter(torch.randn(num_experts, hidden, width) * hidden**-0.5)


class GShard(Experts):
    """Lepikhin et al. 2020, algorithm 1: each row of the batch is a group."""

    def __init__(self, width: int, hidden: int, num_experts: int, capacity: int) -> None:
        super().__init__(width, hidden, num_experts)
        self.gate = nn.Linear(width, num_experts, bias=False)
        self.num_experts, self.capacity = num_experts, capacity

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        combine, extra = self.route(torch.softmax(self.gate(x), dim=-1))
        dispatch = (combine > 0).to(x.dtype)
        rows = torch.einsum("gsec,gsm->egcm", dispatch, x)
        rows = torch.relu(torch.einsum("egcm,emh->egch", rows, self.up))
        rows = torch.einsum("egch,ehm->egcm", rows, self.down)
        return torch.einsum("gsec,egcm->gsm", combine, rows), extra

    def route(self, gates: Tensor) -> tuple[Tensor, Tensor]:
        """(weights [g, s, e, c] of every token at every place, loss of balance)."""
        first = F.one_hot(gates.argmax(dim=-1), self.num_experts).to(gates.dtype)
        rest = gates.masked_fill(first.bool(), 0.0)
        second = F.one_hot(rest.argmax(dim=-1), self.num_experts).to(gates.dtype)
        extra = (gates.mean(dim=1) * first.mean(dim=1)).sum(dim=-1).mean() * self.num_experts
        places = torch.cumsum(first, dim=1) - first
        later = torch.cumsum(second, dim=1) - second + first.sum(dim=1, keepdim=True)
        first = first * (places < self.capacity)
        second = second * (later < self.capacity)
        weights = [(gates * mask).sum(dim=-1) for mask in (first, second)]
        total = weights[0] + weights[1] + 1e-9
        combine = sum(
            (weight / total)[..., None, None]
            * mask[..., None]
            * self.one_hot((place * mask).sum(dim=-1)).unsqueeze(-2)
            for weight, mask, place in zip(weights, (first, second), (places, later), strict=True)
        )
        assert isinstance(combine, Tensor)
        return combine, extra

    def one_hot(self, places: Tensor) -> Tensor:
        return F.one_hot(places.long(), self.capacity).to(places.dtype)


class Switch(Experts):
    """Fedus, Zoph, Shazeer 2021, with all tokens of the batch in one queue per expert."""

    def __init__(self, width: int, hidden: int, num_experts: int, capacity: int) -> None:
        super().__init__(width, hidden, num_experts)
        self.gate = nn.Linear(width, num_experts)
        self.num_experts, self.capacity = num_experts, capacity

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.reshape(-1, x.shape[-1])
        weights, ids, places, extra = self.route(tokens)
        kept = places < self.capacity
        slots = ids * self.capacity + places.clamp(max=self.capacity - 1)
        room = tokens.new_zeros(self.num_experts * self.capacity, tokens.shape[1])
        room = room.index_add(0, slots, tokens * kept[:, None])
        rows = self.run(room.view(self.num_experts, self.capacity, -1))
        back = rows.reshape(self.num_experts * self.capacity, -1)[slots]
        return (back * (weights * kept)[:, None]).view_as(x), extra

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(weight, expert and place of every token, loss of balance)."""
        gates = torch.softmax(self.gate(tokens), dim=-1)
        weights, ids = gates.max(dim=-1)
        mask = F.one_hot(ids, self.num_experts)
        places = (torch.cumsum(mask, dim=0) - 1).gather(1, ids[:, None]).squeeze(1)
        extra = (gates.mean(dim=0) * mask.to(gates.dtype).mean(dim=0)).sum() * self.num_experts
        return weights, ids, places, extra

    def run(self, rows: Tensor) -> Tensor:
        """[e, c, width] through the experts."""
        return torch.bmm(F.gelu(torch.bmm(rows, self.up)), self.down)


class Buffers(Switch):
    """The same by assignment: what is dropped goes to a place of its own that nobody reads."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.reshape(-1, x.shape[-1])
        weights, ids, places, extra = self.route(tokens)
        kept = places < self.capacity
        places = places.clamp(max=self.capacity)
        room = tokens.new_zeros(self.num_experts, self.capacity + 1, tokens.shape[1])
        room[ids, places] = tokens
        rows = F.pad(self.run(room[:, : self.capacity]), (0, 0, 0, 1))
        return (rows[ids, places] * (weights * kept)[:, None]).view_as(x), extra


class Prototypes(nn.Module):
    """Yang et al. 2021 (M6-T): `sets` sets of experts, top 1 and a capacity in each."""

    def __init__(
        self, width: int, hidden: int, num_experts: int, capacity: int, sets: int = 2
    ) -> None:
        super().__init__()
        each = num_experts // sets
        self.gate = nn.Parameter(torch.randn(width, sets, each) * width**-0.5)
        self.up = nn.Parameter(torch.randn(sets, each, width, hidden) * width**-0.5)
        self.down = nn.Parameter(torch.randn(sets, each, hidden, width) * hidden**-0.5)
        self.each, self.capacity = each, capacity

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gates = torch.softmax(torch.einsum("gsm,mke->gske", x, self.gate), dim=-1)
        weights, ids = gates.max(dim=-1)
        mask = F.one_hot(ids, self.each)
        places = ((torch.cumsum(mask, dim=1) - 1) * mask).sum(dim=-1)
        kept = (places < self.capacity).to(x.dtype)
        place = F.one_hot(places.clamp(max=self.capacity - 1), self.capacity).to(x.dtype)
        dispatch = torch.einsum("gske,gskc->gskec", mask.to(x.dtype), place * kept[..., None])
        combine = dispatch * weights[..., None, None]
        rows = torch.einsum("gskec,gsm->kegcm", dispatch, x)
        rows = F.gelu(torch.einsum("kegcm,kemh->kegch", rows, self.up))
        rows = torch.einsum("kegch,kehm->kegcm", rows, self.down)
        return torch.einsum("gskec,kegcm->gsm", combine, rows), x.new_zeros(())


KINDS: dict[str, tuple[type[nn.Module], int]] = {
    "gshard": (GShard, 3),
    "switch": (Switch, 6),
    "buffers": (Buffers, 6),
    "prototypes": (Prototypes, 2),
}
"""Layer and a capacity that drops some tokens of the batch of capacity_model."""


class Layer(nn.Module):
    def __init__(self, experts: nn.Module, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.experts = experts

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + torch.tanh(self.mix(x))
        out, extra = self.experts(self.norm(x))
        return x + out, extra


class Model(nn.Module):
    """Embedding, layers with experts, head, cross entropy and the losses of balance."""

    def __init__(self, layers: list[nn.Module], width: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        extras = []
        for layer in self.layers:
            x, extra = layer(x)
            extras.append(extra)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return loss + 0.01 * torch.stack(extras).sum()


def capacity_model(
    kind: str, *, layers: int = 2, dtype: torch.dtype = torch.float64, **sizes: Any
) -> tuple[nn.Module, dict[str, Tensor]]:
    """A small model of a kind and a batch for it; some of its tokens are dropped."""
    make, capacity = KINDS[kind]
    width = sizes.get("width", WIDTH)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        of_layers = [
            Layer(
                make(
                    width,
                    sizes.get("hidden", HIDDEN),
                    sizes.get("num_experts", EXPERTS),
                    sizes.get("capacity", capacity),
                ),
                width,
            )
            for _ in range(layers)
        ]
        vocabulary = sizes.get("vocabulary", VOCABULARY)
        model = Model(list(of_layers), width, vocabulary).to(dtype)
        shape = sizes.get("batch", BATCH), sizes.get("sequence", SEQUENCE)
        batch = {name: torch.randint(0, vocabulary, shape) for name in ("ids", "labels")}
    return model, batch
