"""Embedding bags: captured as one op that ranks share, by rows, columns or batch."""

from functools import cache
from typing import Any

import pytest
import torch
from support.programs.local_programs import emit_uniform, errors_of_a_step
from torch import Tensor, nn

from meshfold.capture.pipeline import Captured, capture
from meshfold.ir.op_graph import Op
from meshfold.ir.strategy import UniformStrategy
from meshfold.passes.rules.ops.bags import EMBEDDING_BAG
from meshfold.validation.float64_mode import float64_everywhere

BATCH, BAG, ROWS, WIDTH = 8, 3, 24, 4


class Recommender(nn.Module):
    """Bags of three kinds, as DLRM has them, and a linear on top."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = nn.EmbeddingBag(ROWS, WIDTH, mode="sum")
        self.means = nn.EmbeddingBag(ROWS, WIDTH, mode="mean", padding_idx=2)
        self.most = nn.EmbeddingBag(ROWS, WIDTH, mode="max")
        self.flat = nn.EmbeddingBag(ROWS, WIDTH, mode="mean", include_last_offset=True)
        self.top = nn.Linear(4 * WIDTH, 1)

    def forward(self, ids: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
        summed = self.sums(ids, per_sample_weights=torch.sigmoid(weights))
        bags = [summed, self.means(ids), self.most(ids), self.flat(ids.flatten(), offsets)]
        loss: Tensor = self.top(torch.cat(bags, -1)).square().mean()
        return loss


@cache
def captured() -> tuple[nn.Module, dict[str, Tensor], Captured]:
    torch.manual_seed(0)
    model = Recommender().double()
    batch = {
        "ids": torch.randint(0, ROWS, (BATCH, BAG)),
        "weights": torch.randn(BATCH, BAG, dtype=torch.float64),
        "offsets": torch.tensor([0, 2, 2, 7, 12, 13, 20, 21, 24]),
    }
    with float64_everywhere():
        return model, batch, capture(model, batch)


def ops_of(found: Captured) -> list[Op]:
    return [op for region in found.graph.regions for op in region.graph.ops]


def test_bags_of_rows_keep_their_batch() -> None:
    found = captured()[2]
    graph = found.graph.regions[0].graph
    shapes = [graph.values[op.operands[1]].shape for op in ops_of(found) if "bag" in op.target]
    assert shapes == [(BATCH, BAG)] * 3 + [(BATCH * BAG,)]
    assert {op.target for op in ops_of(found) if "bag" in op.target} == {EMBEDDING_BAG}


@pytest.mark.parametrize("option", [{"sparse": True}, {"scale_grad_by_freq": True}])
def test_gradients_without_a_rule_keep_the_op(option: dict[str, Any]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", **option)

        def forward(self, ids: Tensor) -> Tensor:
            total: Tensor = self.bag(ids).sum()
            return total

    found = capture(Model(), {"ids": captured()[1]["ids"]})
    assert "aten.embedding_bag.padding_idx" in {op.target for op in ops_of(found)}


@pytest.mark.parametrize(
    "strategy",
    [UniformStrategy(), UniformStrategy(dp=4), UniformStrategy(dp=2, tp=2, zero=3)],
    ids=lambda s: s.label,
)
def test_ranks_compute_what_one_process_computes(strategy: UniformStrategy) -> None:
    model, batch, found = captured()
    program = emit_uniform(found, strategy, BATCH)
    for errors in errors_of_a_step(model, batch, found, program):
        assert max(errors.values()) < 1e-12
