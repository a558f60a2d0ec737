"""Experts as one op each: which graphs are rewritten, and that the numbers stay."""

from collections.abc import Callable

import pytest
import torch
from support.models.hugging_face import tiny_model
from torch import Tensor, nn

from meshfold.capture.pipeline import Captured, capture
from meshfold.capture.rewrites.expert_linear import EXPERT_LINEAR
from meshfold.ir.op_graph import Op
from meshfold.ops.reference_interpreter import run_graph
from meshfold.validation.float64_mode import float64_everywhere

ROWS, WIDTH, OUT, EXPERTS = 6, 4, 5, 3


class Experts(nn.Module):
    """One product per row, written as `product(weights of the rows, x)`."""

    def __init__(self, product: Callable[..., Tensor], *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, *shape, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(EXPERTS, OUT, dtype=torch.float64))
        self.product = product

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.product(self, x, ids).sin().sum()


def plain(m: Experts, x: Tensor, ids: Tensor) -> Tensor:
    return torch.bmm(m.weight[ids], x.unsqueeze(-1)).squeeze(-1)


def transposed(m: Experts, x: Tensor, ids: Tensor) -> Tensor:
    return torch.bmm(x.unsqueeze(1), m.weight[ids]).squeeze(1)


def biased(m: Experts, x: Tensor, ids: Tensor) -> Tensor:
    return m.bias[ids] + plain(m, x, ids)


def biased_in_place(m: Experts, x: Tensor, ids: Tensor) -> Tensor:
    return transposed(m, x, ids).add_(m.bias[ids])


def bias_of_other_rows(m: Experts, x: Tensor, ids: Tensor) -> Tensor:
    return plain(m, x, ids) + m.bias[ids.flip(0)]


def read_twice(m: Experts, x: Tensor, ids: Tensor) -> Tensor:
    y = plain(m, x, ids)
    return (y + m.bias[ids]) * y


CASES = {
    plain: ((OUT, WIDTH), [2 + 1]),
    transposed: ((WIDTH, OUT), [2 + 1]),
    biased: ((OUT, WIDTH), [2 + 2]),
    biased_in_place: ((WIDTH, OUT), [2 + 2]),
    bias_of_other_rows: ((OUT, WIDTH), [2 + 1]),
    read_twice: ((OUT, WIDTH), [2 + 1, 2 + 2]),
}
"""Shape of an expert's weights; operands of every expert_linear."""


@pytest.mark.parametrize("case", CASES, ids=lambda f: f.__name__)
def test_products_of_gathered_weights_become_one_op(case: Callable[..., Tensor]) -> None:
    shape, num_operands = CASES[case]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Experts(case, *shape)
        inputs = {
            "x": torch.randn(ROWS, WIDTH, dtype=torch.float64),
            "ids": torch.tensor([2, 0, 2, 2, 0, 0]),
        }
    captured = capture(model, inputs)
    found = experts_of(captured)
    assert [len(op.operands) for op in found] == num_operands
    names = {op.target for op in all_ops(captured)}
    assert not names & {"aten.bmm.default"}
    parameters = dict(model.named_parameters())
    outputs = run_graph(captured.graph, parameters, {}, captured.constants, inputs)
    (out,) = outputs.values()
    assert torch.allclose(out, model(**inputs), rtol=0, atol=1e-13)
    (gradients, expected) = (
        torch.autograd.grad(y, list(parameters.values()), allow_unused=True)
        for y in (out, model(**inputs))
    )
    for a, b in zip(gradients, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, rtol=0, atol=1e-13)


def doubled_weights(m: Experts, x: Tensor, ids: Tensor) -> Tensor:
    return torch.bmm(m.weight[ids] * 2, x.unsqueeze(-1)).squeeze(-1)


def by_two_indices(m: Experts, x: Tensor, ids: Tensor) -> Tensor:
    return torch.bmm(m.weight[ids, ids].unsqueeze(1), x[:, :EXPERTS, None]).squeeze(-1)


@pytest.mark.parametrize(
    ("case", "shape"), [(doubled_weights, (OUT, WIDTH)), (by_two_indices, (EXPERTS, EXPERTS))]
)
def test_other_products_stay(case: Callable[..., Tensor], shape: tuple[int, int]) -> None:
    model = Experts(case, *shape)
    ids = torch.tensor([2, 0, 2, 2, 0, 0])
    captured = capture(model, {"x": torch.ones(ROWS, WIDTH, dtype=torch.float64), "ids": ids})
    assert experts_of(captured) == []


def test_mixtral_gathers_no_weights() -> None:
    model, batch = tiny_model("mixtral")
    with float64_everywhere():
        captured = capture(model, batch)
    assert len(experts_of(captured)) == 2 * 2
    weights = {tuple(p.shape) for name, p in model.named_parameters() if "experts" in name}
    for region in captured.graph.regions:
        for value in region.graph.values[len(region.graph.slots) :]:
            assert value.shape[1:] not in {shape[1:] for shape in weights}


def all_ops(captured: Captured) -> list[Op]:
    regions = captured.graph.regions
    return [op for i in captured.graph.instances for op in regions[i.region].graph.ops]


def experts_of(captured: Captured) -> list[Op]:
    return [op for op in all_ops(captured) if op.target == EXPERT_LINEAR]
