"""The adaptive softmax of torch: the loss and gradients of one process, on ranks, too."""

from typing import Any

import pytest
import torch
from support.programs.local_programs import emit_uniform, errors_of_a_step
from torch import Tensor, nn

from meshfold.capture.pipeline import Captured, capture
from meshfold.ir.strategy import UniformStrategy
from meshfold.ops.reference_interpreter import run_graph
from meshfold.validation.float64_mode import float64_everywhere

BATCH, WIDTH, CLASSES = 6, 16, 40


class Predictor(nn.Module):
    def __init__(self, cutoffs: list[int], div_value: float = 2.0) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.out = nn.AdaptiveLogSoftmaxWithLoss(
            WIDTH, CLASSES, cutoffs, div_value=div_value, head_bias=True
        )

    def forward(self, x: Tensor, target: Tensor) -> Any:
        result = self.out(torch.tanh(self.layer(x)), target)
        return result.loss + result.output.pow(2).mean()


def made(
    cutoffs: list[int], shape: tuple[int, ...], low: int = 0, div_value: float = 2.0
) -> tuple[Any, Any, Captured]:
    torch.manual_seed(0)
    model = Predictor(cutoffs, div_value).double()
    x = torch.randn(*shape, WIDTH, dtype=torch.float64)
    batch = {"x": x, "target": torch.randint(low, CLASSES, shape)}
    with float64_everywhere():
        return model, batch, capture(model, batch)


@pytest.mark.parametrize("cutoffs", [[8], [10, 20], [4, 12, 30]])
@pytest.mark.parametrize("strategy", [UniformStrategy(dp=2, zero=3), UniformStrategy(tp=2)])
def test_ranks_have_the_loss_of_one_process(cutoffs: list[int], strategy: UniformStrategy) -> None:
    model, batch, captured = made(cutoffs, (BATCH,))
    assert any("every cluster is computed for all rows" in note for note in captured.graph.notes)
    program = emit_uniform(captured, strategy, BATCH)
    for errors in errors_of_a_step(model, batch, captured, program):
        assert max(errors.values()) < 1e-12


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("strategy", [UniformStrategy(dp=2, zero=3), UniformStrategy(tp=2)])
def test_a_cluster_may_have_no_features(strategy: UniformStrategy) -> None:
    """div_value 5 leaves none of 16 to the second cluster."""
    model, batch, captured = made([10, 20], (BATCH,), div_value=5.0)
    assert any(0 in p.shape for p in model.parameters())
    program = emit_uniform(captured, strategy, BATCH)
    for errors in errors_of_a_step(model, batch, captured, program):
        assert max(errors.values()) < 1e-12


@pytest.mark.parametrize(("shape", "low"), [((BATCH,), 20), ((), 0)], ids=["empty", "one row"])
def test_clusters_without_a_row_and_a_row_without_a_batch(shape: tuple[int, ...], low: int) -> None:
    model, batch, captured = made([4, 12, 30], shape, low)
    parameters = dict(model.named_parameters())
    (loss,) = run_graph(captured.graph, parameters, {}, captured.constants, batch).values()
    expected = model(**batch)
    leaves = list(parameters.values())
    # A cluster without a row has no gradient in torch, and one of zeros here.
    pairs = (torch.autograd.grad(y, leaves, materialize_grads=True) for y in (loss, expected))
    for mine, right in zip(*pairs, strict=True):
        assert torch.allclose(mine, right, rtol=0, atol=1e-14)
    assert torch.allclose(loss, expected, rtol=0, atol=1e-14)
    assert type(model.out) is nn.AdaptiveLogSoftmaxWithLoss
