"""Parts compute what torch does, and so do their backward and the backward of that."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from meshfold.capture.gradients.parts import PARTS, convolution, is_of_part, linear

torch.manual_seed(0)


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def _derivatives(function: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """The value, its gradients, and those of a function of them."""
    found = function(*tensors)
    weights = torch.arange(found.numel(), dtype=found.dtype).view_as(found).cos()
    first = torch.autograd.grad((found * weights).sum(), tensors, create_graph=True)
    second = torch.autograd.grad(
        sum((g.sin().sum() for g in first), found.sum()), tensors, allow_unused=True
    )
    return [found, *first, *(torch.zeros(()) if g is None else g for g in second)]


def _assert_alike(mine: Callable[..., Any], theirs: Callable[..., Any], *shapes: Any) -> None:
    tensors = [_random(*shape) for shape in shapes]
    pairs = zip(_derivatives(mine, tensors), _derivatives(theirs, tensors), strict=True)
    for a, b in pairs:
        assert torch.allclose(a.double(), b.double(), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("batch", [(), (5,), (2, 5)])
def test_linear(batch: tuple[int, ...]) -> None:
    _assert_alike(linear, F.linear, (*batch, 3), (4, 3), (4,))
    _assert_alike(linear, F.linear, (*batch, 3), (4, 3))


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@settings(max_examples=60, deadline=None)
@given(
    num_dims=st.integers(1, 3),
    size=st.integers(5, 7),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    padding=st.sampled_from((0, 1, 2, "same", "valid")),
    dilation=st.integers(1, 2),
    groups=st.sampled_from((1, 2)),
    has_bias=st.booleans(),
)
def test_convolutions(
    num_dims: int,
    size: int,
    kernel: int,
    stride: int,
    padding: Any,
    dilation: int,
    groups: int,
    has_bias: bool,
) -> None:
    stride = 1 if padding == "same" else stride
    form = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    theirs: Any = (F.conv1d, F.conv2d, F.conv3d)[num_dims - 1]
    shapes = [(2, 4, *[size] * num_dims), (6, 4 // groups, *[kernel] * num_dims)]
    _assert_alike(
        lambda *tensors: convolution(*tensors, **form),
        lambda *tensors: theirs(*tensors, **form),
        *shapes,
        *([(6,)] if has_bias else []),
    )


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_and_its_statistics(training: bool) -> None:
    kept = [torch.rand(3).double(), torch.rand(3).double() + 1]
    mine, theirs = [k.clone() for k in kept], [k.clone() for k in kept]
    part = PARTS["aten.batch_norm.default"]
    _assert_alike(
        lambda x, w, b: part(x, w, b, *mine, training, 0.3, 1e-5, False),
        lambda x, w, b: F.batch_norm(x, *theirs, w, b, training, 0.3, 1e-5),
        (6, 3, 2),
        (3,),
        (3,),
    )
    for a, b, before in zip(mine, theirs, kept, strict=True):
        assert torch.allclose(a, b, rtol=1e-12)
        assert torch.equal(a, before) is not training


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"enable_gqa": True},
        {"attn_mask": torch.tensor([[True, False, True], [False, True, True], [True] * 3])},
        {"attn_mask": torch.tensor([[0.0, -1.0, 2.0]] * 3, dtype=torch.float64)},
    ],
)
def test_attention(how: dict[str, Any]) -> None:
    part = PARTS["aten.scaled_dot_product_attention.default"]
    num_heads = 1 if how.get("enable_gqa") else 2
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        _assert_alike(
            lambda q, k, v: part(q, k, v, **how),
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **how),
            (2, 2, 3, 4),
            (2, num_heads, 3, 4),
            (2, num_heads, 3, 5),
        )


def test_a_query_that_may_look_at_nothing_gets_zeros() -> None:
    part = PARTS["aten.scaled_dot_product_attention.default"]
    mask = torch.tensor([[False, False], [True, True]])
    q, k, v = (_random(1, 2, 3) for _ in range(3))
    found = part(q, k, v, attn_mask=mask)
    assert torch.equal(found[0, 0], torch.zeros(3, dtype=torch.float64))
    assert torch.isfinite(torch.autograd.grad(found.sum(), q)[0]).all()


def test_dropout_is_the_op_that_is_drawn_alike() -> None:
    x, part = _random(4, 4), PARTS["aten.dropout.default"]
    assert torch.equal(part(x, 0.5, False), x)
    dropped = part(x, 0.5, True)
    assert torch.equal(dropped[dropped != 0], (2 * x)[dropped != 0])


def test_log_sigmoid() -> None:
    _assert_alike(PARTS["aten.log_sigmoid.default"], F.logsigmoid, (9,))


def test_nodes_of_parts_are_known() -> None:
    found = linear(_random(2, 3), _random(4, 3))
    assert is_of_part(found.grad_fn)
    assert not is_of_part(found.sum().grad_fn)
