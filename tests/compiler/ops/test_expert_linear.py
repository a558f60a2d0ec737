"""meshfold::expert_linear against one product per row: values, gradients, what it keeps."""

import pytest
import torch
from support.graphs.tensors import real, whole
from support.programs.memory import allocator_peak_bytes
from torch import Tensor

from meshfold.cost_models.memory.op_memory import ProbeKey, TensorSpec, dense_spec
from meshfold.ir.op_graph import Ref
from meshfold.memory_probe.prober import OpProber
from meshfold.ops.expert_linear import (
    expert_linear,
    expert_linear_backward,
    expert_linear_scratch_bytes,
)

NUM_EXPERTS = 3


def row_by_row(x: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None) -> Tensor:
    """weight [e, o, k]; nothing for rows without an expert."""
    rows = []
    for row, expert in zip(x, ids.tolist(), strict=True):
        if expert == NUM_EXPERTS:
            rows.append(x.new_zeros(weight.shape[1]))
        else:
            rows.append(weight[expert] @ row + (0 if bias is None else bias[expert]))
    return torch.stack(rows)


ROUTINGS = {
    "mixed": [2, 0, 2, 1, 0, 2],
    "one expert takes all": [1, 1, 1, 1, 1, 1],
    "rows without an expert": [3, 0, 3, 2, 2, 3],
    "no rows": [],
}


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_values_and_gradients_equal_a_product_per_row(
    routing: str, transposed: bool, biased: bool, dtype: torch.dtype
) -> None:
    ids = torch.tensor(ROUTINGS[routing], dtype=torch.int64)
    x = torch.randn(len(ids), 4, dtype=dtype, requires_grad=True)
    weight = torch.randn(NUM_EXPERTS, 5, 4, dtype=dtype, requires_grad=True)
    bias = torch.randn(NUM_EXPERTS, 5, dtype=dtype, requires_grad=True) if biased else None
    given = weight.detach().transpose(1, 2).contiguous() if transposed else weight.detach()
    given.requires_grad_()
    out = expert_linear(x, given, ids, bias, transposed)
    if not len(ids):
        assert out.shape == (0, 5)
        return
    expected = row_by_row(x, weight, ids, bias)
    assert torch.allclose(out, expected, rtol=0, atol=1e-14)
    cotangent = torch.randn_like(expected)
    leaves = [t for t in (x, weight, bias) if t is not None]
    wanted = torch.autograd.grad(expected, leaves, cotangent)
    leaves[1] = given
    found = list(torch.autograd.grad(out, leaves, cotangent))
    if transposed:
        found[1] = found[1].transpose(1, 2)
    for a, b in zip(found, wanted, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-13)


def test_autograd_agrees_with_finite_differences() -> None:
    ids = whole(NUM_EXPERTS, 6)
    weight, bias = real(NUM_EXPERTS, 5, 4), real(NUM_EXPERTS, 5)
    assert torch.autograd.gradcheck(lambda *t: expert_linear(t[0], t[1], ids, t[2]), (
        real(6, 4), weight, bias
    ))  # fmt: skip


def probed(*, trains_weight: bool = True) -> tuple[TensorSpec, ...]:
    return (
        dense_spec((6, 4), "float32", True),
        dense_spec((3, 5, 4), "float32", trains_weight),
        dense_spec((6,), "int64", False),
        dense_spec((3, 5), "float32", trains_weight),
    )


@pytest.mark.parametrize("trains_weight", [True, False])
def test_it_keeps_rows_weights_and_ids_and_gathers_no_weights(trains_weight: bool) -> None:
    specs = probed(trains_weight=trains_weight)
    refs = tuple(Ref(k) for k in range(4))
    found = OpProber()(ProbeKey("meshfold.expert_linear.default", (*refs, False), (), specs))
    assert found.outputs[0].spec.shape == (6, 5)
    assert found.saved_operands == (0, 1, 2)
    assert (found.saved_outputs, found.saved_bytes) == ((), 0)
    weights = (3 * 5 * 4 * 4, 3 * 5 * 4) if trains_weight else ()
    assert found.fresh_gradient_bytes == (6 * 4 * 4, *weights)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("routing", ["one", "two", "even"])
def test_what_it_holds_inside_is_no_more_than_a_probe_says(routing: str, has_bias: bool) -> None:
    rows, columns, width, experts = 256, 48, 32, 4
    x, weight = torch.randn(rows, columns), torch.randn(experts, width, columns)
    bias = torch.randn(experts, width) if has_bias else None
    ids = torch.arange(rows) % {"one": 1, "two": 2, "even": experts}[routing]
    gradient = torch.randn(rows, width)

    def forward() -> None:
        expert_linear(x, weight, ids, bias)

    def backward() -> None:
        expert_linear_backward(gradient, x, weight, ids, False, [True, True, has_bias])

    results = [gradient.nbytes, x.nbytes + weight.nbytes + (bias.nbytes if has_bias else 0)]
    held = [
        allocator_peak_bytes(run) - made
        for run, made in zip((forward, backward), results, strict=True)
    ]
    most = expert_linear_scratch_bytes(x, weight, ids, bias)
    assert all(a <= b for a, b in zip(held, most, strict=True))
    if routing == "one":
        assert held == list(most)
