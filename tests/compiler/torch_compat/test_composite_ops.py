"""Composite ops without a rule are written in ops that have one, and compute the same."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.capture.pipeline import Captured, capture
from meshfold.ops.reference_interpreter import run_graph
from meshfold.passes.rules.table import op_labels

X = torch.linspace(-1, 1, 48, dtype=torch.float64).reshape(2, 6, 4)


class Model(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x)).square().sum()


def with_same_numbers(model: nn.Module) -> Captured:
    """The captured model, which computes loss and gradients as the model does."""
    captured = capture(model, {"x": X})
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    outputs = run_graph(captured.graph, parameters, before, captured.constants, {"x": X})
    (found,) = outputs.values()
    wanted = model(X)
    for mine, theirs in zip(
        torch.autograd.grad(found, list(parameters.values())),
        torch.autograd.grad(wanted, list(parameters.values())),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    return captured


def ops_of(captured: Captured, *, whole: bool = False) -> set[str]:
    """Names of ops; whole: of those without a rule alone."""
    graphs = [region.graph for region in captured.graph.regions]
    return {op.target for g in graphs for op in g.ops if not whole or op_labels(g, op) is None}


def many(x: Tensor) -> Tensor:
    stacked = torch.vstack([torch.hstack([x, x.fliplr()]), torch.tile(x, (1, 2, 1))])
    norms = torch.linalg.norm(stacked, dim=-1) + F.prelu(stacked, x.new_full((1,), 0.3)).std(-1)
    pooled = F.adaptive_max_pool1d(stacked, 2).sum(-1)
    return (
        norms + pooled + torch.inner(stacked, stacked[0, 0]) + torch.kron(norms[:1], norms[:, :1])
    )


def test_composite_ops_are_written_in_ops_that_have_rules() -> None:
    captured = with_same_numbers(Model(many))
    assert ops_of(captured, whole=True) == set()
    assert "aten.linear.default" in ops_of(captured), "has a rule and stays"


@pytest.mark.parametrize(
    "function, op",
    [
        (lambda x: x.quantile(0.5, dim=-1), "aten.quantile.scalar"),
        (lambda x: torch.linalg.inv(x[:, :4] + 3 * torch.eye(4).double()), "aten.linalg_inv"),
    ],
)
def test_an_op_that_checks_values_is_not_taken_apart(
    function: Callable[[Tensor], Tensor], op: str
) -> None:
    captured = with_same_numbers(Model(function))
    assert any(target.startswith(op) for target in ops_of(captured))


def test_running_statistics_of_an_instance_norm_are_updated() -> None:
    norm = nn.InstanceNorm1d(6, affine=True, track_running_stats=True).double()
    captured = with_same_numbers(Model(norm))
    graph = captured.graph
    updated = {
        instance.sources[slot].name
        for instance in graph.instances
        for slot, _ in graph.regions[instance.region].graph.mutations
    }
    assert {"function.running_mean", "function.running_var"} <= updated
    with_same_numbers(Model(norm.eval()))
