"""Functions of torch that a trace takes in another form."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.programs.local_programs import emit_uniform, errors_of_a_step
from torch import Tensor, nn
from torch.nn import functional

from meshfold.capture.library_modules.functions import in_ops
from meshfold.capture.pipeline import Captured, capture
from meshfold.ir.strategy import UniformStrategy
from meshfold.validation.float64_mode import float64_everywhere

BATCH = 8
CHUNKED = pytest.mark.skipif(
    not hasattr(functional, "linear_cross_entropy"), reason="of torch 2.13 and later"
)


def answered(func: Any, *args: Any, **kwargs: Any) -> Any:
    return in_ops(func, args, kwargs, lambda condition, text: None)


class Decorrelated(nn.Module):
    """Redundancy of features over the batch, as in Barlow Twins."""

    def __init__(self, measure: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.measure = nn.Linear(6, 4), measure

    def forward(self, x: Tensor) -> Tensor:
        return (self.measure(self.layer(x).T) - torch.eye(4)).square().sum()


class PerSample(nn.Module):
    """Products with vectors, of one sample at a time."""

    def __init__(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.product = nn.Parameter(torch.randn(6, 6)), product

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(lambda row: self.product(self.weight, row).tanh())(x).sum()


class Head(nn.Module):
    """A vocabulary of 12 whose logits torch makes in chunks of rows."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 8), nn.Linear(8, 12)
        self.kwargs = kwargs

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        losses = functional.linear_cross_entropy(
            self.layer(x).relu(),
            self.head.weight,
            labels,
            linear_bias=self.head.bias,
            options=nn.LinearCrossEntropyOptions(),
            **self.kwargs,
        )
        return losses.sum()


def captured(model: nn.Module, batch: dict[str, Tensor]) -> Captured:
    with float64_everywhere():
        return capture(model, batch)


def check(model: nn.Module, batch: dict[str, Tensor]) -> list[str]:
    """Compares steps of two plans with the model's own; returns the ops."""
    found = captured(model, batch)
    for strategy in (UniformStrategy(dp=2, zero=3), UniformStrategy(dp=1, tp=2)):
        program = emit_uniform(found, strategy, BATCH)
        for errors in errors_of_a_step(model, batch, found, program):
            assert max(errors.values()) < 1e-12
    return [op.target for region in found.graph.regions for op in region.graph.ops]


@pytest.mark.parametrize("measure", [torch.cov, torch.corrcoef, Tensor.cov, Tensor.corrcoef])
def test_covariances_of_a_batch_are_sums_over_its_shards(
    measure: Callable[[Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    check(Decorrelated(measure).double(), {"x": torch.randn(BATCH, 6).double()})


@pytest.mark.parametrize("shape", [(3, 7), (1, 7), (7,)])
@pytest.mark.parametrize("correction", [0, 1, 2])
def test_covariances_are_those_of_torch(shape: tuple[int, ...], correction: int) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(
        answered(torch.cov, x, correction=correction), torch.cov(x, correction=correction)
    )
    torch.testing.assert_close(answered(torch.corrcoef, x), torch.corrcoef(x))


@pytest.mark.parametrize(
    ("x", "kwargs"),
    [
        (torch.ones(2, 2), {"fweights": torch.tensor([1, 2])}),
        (torch.ones(2, 2), {"aweights": torch.ones(2)}),
        (torch.ones(2, 2), {"correction": 2}),
        (torch.ones(2, 2, dtype=torch.complex64), {}),
        (torch.ones(()), {}),
    ],
)
def test_other_covariances_are_left_to_torch(x: Tensor, kwargs: dict[str, Any]) -> None:
    assert answered(torch.cov, x, **kwargs) is NotImplemented


@pytest.mark.parametrize(
    "product",
    [
        torch.mv,
        lambda weight, row: weight.mv(row),
        lambda weight, row: weight @ row,
        lambda weight, row: row @ weight,
        lambda weight, row: torch.matmul(input=weight, other=row),
        lambda weight, row: torch.mv(input=weight, vec=row),
        lambda weight, row: weight.unsqueeze(0) @ row,
        lambda weight, row: row @ weight.unsqueeze(0),
        lambda weight, row: (row @ row) * (weight @ weight)[0],
    ],
)
def test_products_with_vectors_of_one_sample(product: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    check(PerSample(product).double(), {"x": torch.randn(BATCH, 6).double()})


@CHUNKED
@pytest.mark.parametrize("kwargs", [{}, {"reduction": "sum"}, {"reduction": "none"}])
def test_a_chunked_head_is_a_layer_and_a_loss(kwargs: dict[str, Any]) -> None:
    torch.manual_seed(0)
    labels = torch.tensor([0, 5, 11, -100, 3, 7, 2, 2])
    targets = check(
        Head(**kwargs).double(), {"x": torch.randn(BATCH, 6).double(), "labels": labels}
    )
    assert targets.count("aten.linear.default") == 2
    assert any("cross_entropy" in target for target in targets)
    assert not any("chunked" in target for target in targets)


@CHUNKED
def test_a_head_without_chunks_is_left_to_torch() -> None:
    operands = torch.ones(2, 3), torch.ones(4, 3), torch.tensor([0, 1])
    assert answered(functional.linear_cross_entropy, *operands) is NotImplemented
