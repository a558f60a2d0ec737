"""Batches of several sizes through one compiled model, on the ranks of a pool."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshfold
from meshfold.ir.options import CompileOptions, PinValue
from meshfold.sharding.layout import shard_of
from meshfold.training.shards.local_shard import local_tensor
from meshfold.validation.float64_mode import float64_everywhere
from support.models.hugging_face import tiny_model


def errors(
    family: str, pins: Mapping[str, PinValue], sizes: Sequence[tuple[int, int]], in_parts: bool
) -> list[float]:
    """By (batch, sequence) the largest difference of the loss and of every gradient from one
    process. family: or "summed", whose loss is a sum. in_parts: every rank passes its own rows
    alone."""
    options = CompileOptions(pins=pins)
    with float64_everywhere():
        model = Summed() if family == "summed" else tiny_model(family)[0]
        cluster = f"local-cpux{dist.get_world_size()}"
        compiled = meshfold.compile(model, cluster, batch_of(*sizes[0]), options=options)
        found = []
        for size in sizes:
            batch = batch_of(*size)
            model.zero_grad()
            returned = model(**batch)
            expected = getattr(returned, "loss", returned)
            expected.backward()
            compiled.zero_grad()
            if in_parts:
                rows = size[0] // dist.get_world_size()
                batch = {n: x.split(rows)[dist.get_rank()] for n, x in batch.items()}
            loss = compiled.train_step(batch)
            worst = float((loss - expected).detach().abs())
            assert compiled.rank_mesh is not None
            whole = dict(model.named_parameters())
            stored = stored_layouts(compiled)
            for name, parameter in compiled.named_parameters():
                right = whole[name].grad
                assert right is not None and parameter.grad is not None
                mine = shard_of(
                    right, stored[name], compiled.plan.mesh.sizes, compiled.rank_mesh.coords
                )
                worst = max(worst, float((local_tensor(parameter.grad) - mine).abs().max()))
            found.append(worst)
    return found


class Summed(nn.Module):
    """A batch whose rows are counted twice has twice the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 4)
        self.head = nn.Linear(4, 32)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.embed(input_ids))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def stored_layouts(compiled: meshfold.CompiledModel) -> Mapping[str, tuple[object, ...]]:
    parts = compiled.program.stage_programs(compiled.rank_mesh.coords)
    return {name: layout for part in parts for name, layout in part.stored.items()}


def batch_of(rows: int, sequence: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows * sequence)
    tokens = torch.randint(4, 32, (rows, sequence), generator=generator)
    labels = torch.randint(4, 32, (rows, sequence), generator=generator)
    labels[0, : sequence // 2] = -100
    return {"input_ids": tokens, "labels": labels}
