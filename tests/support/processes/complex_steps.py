"""Steps of a model with complex parameters, on gloo processes."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshfold
from meshfold.sharding.layout import shard_of
from meshfold.training.shards.local_shard import local_tensor


class Mixing(nn.Module):
    """Mixes channels by frequency, as a neural operator does, with a complex product."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex128) / 8)

    def forward(self, x: Tensor) -> Tensor:
        found = torch.fft.rfft(self.up(x), dim=1)
        mixed = torch.mm(found.flatten(0, 1), self.weight).view_as(found)
        return x + self.down(torch.fft.irfft(mixed, n=x.shape[1], dim=1))


class Operator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixing() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def operator() -> tuple[nn.Module, dict[str, Tensor]]:
    """In float64 and complex128, the same on all ranks."""
    torch.manual_seed(0)
    return Operator().double(), {"x": torch.randn(4, 6, 8, dtype=torch.float64)}


def worst_error(pins: dict[str, Any], mode: str) -> float:
    """Of the loss and the gradients of one step, of what one process computes."""
    model, batch = operator()
    options = meshfold.CompileOptions(pins=pins, mode=mode)
    compiled = meshfold.compile(model, f"local-cpux{dist.get_world_size()}", batch, options=options)
    loss = compiled.train_step(batch)
    expected = model(**batch)
    expected.backward()
    worst = float((loss - expected).detach().abs())
    whole = dict(model.named_parameters())
    stored, sizes = compiled.program.stored, compiled.program.mesh.sizes
    for name, parameter in compiled.named_parameters():
        gradient = whole[name].grad
        assert gradient is not None and parameter.grad is not None
        assert compiled.rank_mesh is not None
        right = shard_of(gradient, stored[name], sizes, compiled.rank_mesh.coords)
        error = (local_tensor(parameter.grad) - right).abs().max() / gradient.abs().max()
        worst = max(worst, float(error))
    compiled.close()
    return worst
