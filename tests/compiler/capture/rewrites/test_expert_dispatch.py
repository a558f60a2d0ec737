"""Which rows may travel to their experts: a chain of products travels once."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from meshfold.capture.pipeline import Captured, capture
from meshfold.ir.op_graph import Op
from meshfold.ops.reference_interpreter import run_graph
from meshfold.passes.rules.ops.experts import COMBINE, DISPATCH, EXPERT_LINEAR

ROWS, WIDTH, EXPERTS = 6, 4, 3


class Experts(nn.Module):
    def __init__(self, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH, dtype=torch.float64))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH, dtype=torch.float64))
        self.of = forward

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.of(self, x, ids).cos().sum()


def product(weight: Tensor, x: Tensor, ids: Tensor) -> Tensor:
    return torch.bmm(weight[ids], x.unsqueeze(-1)).squeeze(-1)


def gated(m: Experts, x: Tensor, ids: Tensor) -> Tensor:
    gate, up = product(m.up, x.sin(), ids).chunk(2, dim=-1)
    return product(m.down, gate.sigmoid() * up, ids)


def gated_by_every_other(m: Experts, x: Tensor, ids: Tensor) -> Tensor:
    both = product(m.up, x, ids)
    return product(m.down, both[:, ::2].clamp(max=1.0) * (both[:, 1::2] + 1), ids)


def inner_read_outside(m: Experts, x: Tensor, ids: Tensor) -> Tensor:
    gate, up = product(m.up, x, ids).chunk(2, dim=-1)
    return product(m.down, gate * up, ids) + gate


def weighted_between(m: Experts, x: Tensor, ids: Tensor) -> Tensor:
    """x stays at home, so what is made with it does."""
    gate, up = product(m.up, x, ids).chunk(2, dim=-1)
    return product(m.down, gate * up * x, ids)


def mixed_rows(m: Experts, x: Tensor, ids: Tensor) -> Tensor:
    gate, up = product(m.up, x, ids).chunk(2, dim=-1)
    return product(m.down, gate * up.flip(0), ids)


def rerouted(m: Experts, x: Tensor, ids: Tensor) -> Tensor:
    gate, up = product(m.up, x, ids).chunk(2, dim=-1)
    return product(m.down, gate * up, ids.flip(0))


CASES = {
    # Rows and ids go there, rows come back.
    gated: (2, 1),
    gated_by_every_other: (2, 1),
    inner_read_outside: (2, 2),
    weighted_between: (3, 2),
    mixed_rows: (3, 2),
    rerouted: (4, 2),
}
"""Numbers of dispatch and combine."""


@pytest.mark.parametrize("case", CASES, ids=lambda f: f.__name__)
def test_rows_travel_once_and_whoever_stays_at_home_reads_what_came_back(
    case: Callable[..., Tensor],
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Experts(case)
        inputs = {
            "x": torch.randn(ROWS, WIDTH, dtype=torch.float64),
            "ids": torch.tensor([2, 0, 2, 2, 0, 1]),
        }
    captured = capture(model, inputs)
    assert (count(captured, DISPATCH), count(captured, COMBINE)) == CASES[case]
    assert count(captured, EXPERT_LINEAR) == 2
    check_sides(captured)
    parameters = dict(model.named_parameters())
    (out,) = run_graph(captured.graph, parameters, {}, captured.constants, inputs).values()
    assert torch.allclose(out, model(**inputs), rtol=0, atol=1e-12)


def check_sides(captured: Captured) -> None:
    """No op reads rows that are at home and rows that are away, but for the weights and ids."""
    for region in captured.graph.regions:
        away: set[int] = set()
        for op in region.graph.ops:
            rows = op.operands[:1] if op.target == EXPERT_LINEAR else op.operands
            if op.target == DISPATCH:
                assert away.isdisjoint(op.operands)
                away.update(op.outputs)
            elif op.target == COMBINE:
                assert op.operands[0] in away and op.operands[1] not in away
            elif not away.isdisjoint(rows):
                assert away.issuperset(rows), op
                away.update(op.outputs)
        assert away.isdisjoint(region.graph.outputs)


def count(captured: Captured, target: str) -> int:
    return sum(op.target == target for op in all_ops(captured))


def all_ops(captured: Captured) -> list[Op]:
    regions = captured.graph.regions
    return [op for i in captured.graph.instances for op in regions[i.region].graph.ops]
