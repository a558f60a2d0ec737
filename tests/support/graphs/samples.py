"""A representative call of every op in the rule table, small enough for many simulated ranks.

Dims are 12 or multiples, so that axes of 2, 3 and 4 ranks divide them.
"""

from typing import Any

import torch
from torch import Tensor

from meshfold.passes.rules.ops.pointwise import BINARY, UNARY
from support.graphs.calls import Sample, X, call
from support.graphs.complex_samples import COMPLEX, WINDOWS
from support.graphs.linalg_samples import LINALG
from support.graphs.loss_samples import LOSS
from support.graphs.own_samples import BAGS, CHECKS, EXPERTS, FUSED, RANDOM, RING
from support.graphs.recurrence_samples import RECURRENCE
from support.graphs.spatial_samples import SPATIAL
from support.graphs.tensors import (
    few,
    flags,
    halves,
    one,
    permuted,
    places,
    real,
    special,
    steps,
    whole,
)


def _binary(name: str) -> Sample:
    """An elementwise function of two tensors, or of a tensor and a number."""
    if name.startswith(("floor_divide", "gcd", "lcm")) or "shift" in name:
        return call(name, whole(99, *X), 1 + whole(9, 12, 1))
    if name.startswith(("_", "bitwise", "logical")):
        # What leaves the flags as they are: True for and, False for or.
        scalar = "and" in name
        return call(name, flags(*X), scalar if name.endswith("Scalar") else flags(12, 1))
    x, other = (halves(*X), halves(12, 1)) if name in _EQUALITIES else (real(*X), real(12, 1))
    return call(name, x, 0.5 if name.endswith("Scalar") else other)


_EQUALITIES = ("eq.Scalar", "ne.Scalar", "eq.Tensor", "ne.Tensor")
_ROUNDING = ("ceil", "floor", "frac", "round", "selu", "sgn", "sign", "signbit", "trunc")


def _unary(name: str) -> Sample:
    if "not" in name:
        return call(f"{name}.default", flags(*X))
    make = special if name.startswith("is") else steps if name in _ROUNDING else real
    x = 1.0 / real(*X).detach() if name == "acosh" else make(*X)
    return call(f"{name}.default", x.detach().requires_grad_())


def _attention(
    *,
    heads: int = 12,
    key_heads: int = 12,
    rows: int = 12,
    mask: Tensor | None = None,
    **kwargs: Any,
) -> Sample:
    query = real(4, heads, rows, 3)
    key, value = real(4, key_heads, 24, 3), 1.0 + real(4, key_heads, 24, 3).detach()
    name = "scaled_dot_product_attention.default"
    return call(name, query, key, value.requires_grad_(), mask, **kwargs)


POINTWISE: tuple[Sample, ...] = (
    *(_unary(name) for name in UNARY),
    *(_binary(name) for name in BINARY),
    call("neg.default", real(*X)),
    call("alias.default", real(*X)),
    call("detach.default", real(*X)),
    call("lift_fresh_copy.default", real(*X)),
    call("clone.default", real(*X), memory_format=torch.contiguous_format),
    call("contiguous.default", real(*X)),
    call("_to_copy.default", real(*X), dtype=torch.float64),
    call("_to_copy.default", flags(*X), dtype=torch.float64),
    call("add.Tensor", real(*X), real(12, 24), alpha=2),
    call("add.Tensor", real(*X), 1.5),
    call("add.Tensor", real(4, 12, 1), real(1, 24)),
    call("add.Tensor", whole(9, 4, 12), whole(9, 12)),
    call("sub.Tensor", real(*X), real(*X, seed=8)),
    call("add.Scalar", real(*X), 1.5),
    call("sub.Scalar", real(*X), 1.5),
    call("rsub.Scalar", real(*X), 2.0),
    call("mul.Tensor", real(*X), real(4, 1, 24)),
    call("mul.Tensor", real(*X), 0.5),
    call("mul.Tensor", real(*X), flags(12, 24)),
    call("mul.Scalar", real(*X), 3.0),
    call("div.Tensor", real(*X), real(*X, seed=8)),
    call("div.Tensor", real(*X), 3.0),
    call("div.Scalar", real(*X), 3.0),
    call("div.Tensor_mode", real(*X), 0.03, rounding_mode="floor"),
    call("div.Tensor_mode", real(*X), real(24), rounding_mode=None),
    call("where.self", flags(4, 1, 24), real(*X), real(12, 24)),
    call("where.ScalarOther", flags(12, 24), real(*X), 2.0),
    call("where.ScalarOther", flags(12, 24), real(*X), 0.0),
    call("where.ScalarSelf", flags(12, 24), 2.0, real(*X)),
    call("where.Scalar", flags(12, 24), 2.0, 3.0),
    call("masked_fill.Scalar", real(*X), flags(12, 24), 0),
    call("masked_fill.Scalar", real(*X), flags(12, 24), -1.5),
    call("masked_fill.Tensor", real(*X), flags(12, 24), real()),
    call("pow.Tensor_Scalar", real(*X), 3.0),
    call("pow.Tensor_Tensor", real(*X), real(24)),
    call("pow.Scalar", 2.0, real(*X)),
    call("rsub.Tensor", real(*X), real(12, 24), alpha=2),
    call("polygamma.default", 1, real(*X)),
    call("_prelu_kernel.default", steps(*X), real(12, 1)),
    call("bucketize.Tensor", real(*X), real(5).detach().sort()[0]),
    call("gelu.default", real(*X), approximate="tanh"),
    call("gelu.default", real(*X)),
    call("clamp.default", real(*X), 0.3, 0.7),
    call("clamp.Tensor", real(*X), real(24), 1 + real(12, 1).detach()),
    call("clamp.Tensor", real(*X), None, real(12, 24)),
    call("clamp_min.Tensor", real(*X), real(24)),
    call("clamp_max.Tensor", real(*X), real(24)),
    call("clamp_min.default", real(*X), 0.4),
    call("clamp_max.default", real(*X), 0.4),
    call("leaky_relu.default", real(*X), 0.1),
    call("softplus.default", real(*X)),
    call("elu.default", real(*X)),
    call("celu.default", steps(*X), 0.7),
    call("threshold.default", real(*X), 0.4, 2.0),
    call("logit.default", real(*X), 0.2),
    call("nan_to_num.default", special(*X), 0.5, 2.0),
    call("addcmul.default", real(*X), real(12, 1), real(24, seed=9), value=2.0),
    call("addcdiv.default", real(*X), real(12, 1), real(24, seed=9), value=2.0),
    call("lerp.Scalar", real(*X), real(12, 24), 0.3),
    call("lerp.Tensor", real(*X), real(12, 24), real(24, seed=9)),
    call("hardtanh.default", real(*X), 0.3, 0.7),
    call("fill.Scalar", real(*X), 2.0),
    call("fill.Tensor", real(*X), real()),
    call("copy.default", whole(9, *X), whole(9, 12, 24)),
    call("zeros_like.default", real(*X), pin_memory=False),
    call("ones_like.default", real(*X)),
    call("full_like.default", real(*X), 3.0),
)

CONTRACTION: tuple[Sample, ...] = (
    call("linear.default", real(4, 12, 24), real(36, 24), real(36)),
    call("linear.default", real(4, 12, 24), real(36, 24)),
    call("linear.default", real(24), real(36, 24), real(36)),
    call("linear.default", real(12, 24), real(24), None),
    call("addmm.default", real(36), real(24, 12), real(12, 36)),
    call("addmm.default", real(24, 1), real(24, 12), real(12, 36), beta=2, alpha=3),
    call("baddbmm.default", real(1, 24, 36), real(4, 24, 12), real(4, 12, 36), beta=0.5),
    call("mm.default", real(24, 12), real(12, 36)),
    call("bmm.default", real(12, 24, 12), real(12, 12, 4)),
    call("matmul.default", real(4, 12, 24), real(24, 12)),
    call("matmul.default", real(4, 1, 12, 24), real(12, 24, 12)),
    call("matmul.default", real(24), real(24, 12)),
    call("matmul.default", real(12, 24), real(24)),
    call("matmul.default", real(24), real(24)),
    call("mv.default", real(12, 24), real(24)),
    call("dot.default", real(24), real(24, seed=8)),
    call("vdot.default", real(24), real(24, seed=8)),
    call("conv1d.default", real(4, 12, 9), real(24, 12, 3), real(24), [2], [1]),
    call("conv2d.default", real(4, 12, 6, 6), real(24, 12, 3, 3), real(24), [3, 3]),
    call("conv2d.default", real(4, 12, 6, 6), real(24, 4, 3, 3), None, [1, 1], [1, 1], [1, 1], 3),
    call("conv2d.default", real(4, 24, 4, 4), real(12, 2, 3, 3), real(12), groups=12),
    call("conv1d.padding", real(4, 12, 9), real(24, 12, 3), real(24), [1], "same"),
    call("conv2d.padding", real(4, 12, 4, 4), real(12, 1, 3, 3), None, [1, 1], "same", [1], 12),
    call("conv3d.padding", real(4, 12, 3, 3, 3), real(12, 12, 2, 2, 2), None, [1], "valid"),
    call("conv3d.default", real(4, 12, 3, 3, 3), real(12, 12, 2, 2, 2)),
    call("conv_transpose1d.default", real(4, 12, 5), real(12, 24, 3), real(24), [2]),
    call("conv_transpose2d.input", real(4, 12, 3, 3), real(12, 2, 2, 2), real(24), groups=12),
    call("conv_transpose2d.input", real(4, 12, 3, 3), real(12, 24, 2, 2), real(24)),
    call("conv_transpose3d.input", real(4, 12, 2, 2, 2), real(12, 12, 2, 2, 2)),
)

_STATISTICS = (real(12, grad=False), 1 + real(12, grad=False))

NORMALIZATION: tuple[Sample, ...] = (
    call(
        "_native_batch_norm_legit_functional.default",
        *(real(24, 12, 2, 3), real(12), real(12), *_STATISTICS, True, 0.3, 1e-5),
    ),
    call(
        "_native_batch_norm_legit_functional.default",
        *(real(24, 12), None, None, *_STATISTICS, True, 0.1, 1e-3),
    ),
    call("_native_batch_norm_legit.no_stats", real(24, 12, 2), real(12), real(12), True, 0.1, 0.0),
    call(
        "_native_batch_norm_legit_no_training.default",
        *(real(24, 12, 2, 3), real(12), real(12), *_STATISTICS, 0.1, 1e-5),
    ),
    call("_weight_norm.default", real(12, 24, 2), real(1, 1, 2), 2),
    call("_weight_norm.default", real(12, 24), real(12, 1)),
    call("group_norm.default", real(12, 24, 2, 2), 12, real(24), real(24), 1e-5, False),
    call("group_norm.default", real(12, 24, 3), 4),
    call("group_norm.default", real(12, 24, 3), 1, real(24)),
    call(
        "instance_norm.default",
        *(real(12, 12, 4), real(12), real(12), None, None, True, 0.1, 1e-5, False),
    ),
)

REDUCTION: tuple[Sample, ...] = (
    call("sum.dim_IntList", real(*X), [1], True),
    call("sum.dim_IntList", real(*X), [0, -1]),
    call("sum.dim_IntList", flags(*X), [0, -1]),
    call("sum.dim_IntList", real(*X), [-1], dtype=torch.float64),
    call("sum.default", real(*X)),
    call("mean.dim", real(*X), [-1], True),
    call("mean.dim", real(*X), [0, 1]),
    call("mean.default", real(*X)),
    call("amax.default", real(*X), [1]),
    call("amin.default", real(*X), [1], True),
    call("max.default", real(*X)),
    call("min.default", real(*X)),
    call("max.dim", real(*X), 1),
    call("min.dim", real(*X), -1, True),
    call("argmax.default", real(*X), -1),
    call("argmax.default", real(*X)),
    call("argmin.default", real(*X), 1, True),
    call("any.default", one(*X)),
    call("any.dim", few(*X), 1),
    call("all.default", ~one(*X)),
    call("all.dim", ~few(*X), 1),
    call("logsumexp.default", real(*X), [1]),
    call("var.correction", real(*X), [1], correction=1, keepdim=True),
    call("std.correction", real(*X), [1], correction=0),
    call("var_mean.correction", real(*X), [1], correction=1, keepdim=True),
    call("std_mean.correction", real(*X), [-1], correction=0),
    call("prod.default", real(*X)),
    call("prod.dim_int", real(*X), 1, True),
    call("nansum.default", special(*X), [1]),
    call("aminmax.default", real(*X), dim=-1, keepdim=True),
    call("median.default", real(*X)),
    call("median.dim", real(*X), 1),
    call("kthvalue.default", real(*X), 3),
    *(call(f"count_nonzero.{x}", flags(*X), d) for x, d in (("default", 1), ("dim_IntList", [0]))),
    call("linalg_vector_norm.default", real(*X), 2, [2], True),
    call("softmax.int", real(*X), -1),
    call("_softmax.default", real(*X), 1, False),
    call("log_softmax.int", real(*X), -1),
    call("_log_softmax.default", real(*X), 1, False),
    call("topk.default", real(*X), 2),
    call("sort.default", real(*X), 1),
    call("argsort.default", real(*X), 1),
    call("cumprod.default", real(*X), 1),
    call("logcumsumexp.default", real(*X), -1),
    call("cummax.default", real(*X), 1),
    call("cummin.default", real(*X), -1),
    call("cumsum.default", real(*X), 1),
    call("cumsum.default", flags(*X), -1),
    call("cumsum.default", real(24, 12), 0, dtype=torch.float64),
    call("diff.default", real(*X), 1, 1, real(4, 2, 24)),
    call("layer_norm.default", real(*X), [24], real(24), 1 + real(24).detach(), 1e-5, False),
    call("layer_norm.default", real(*X), [12, 24]),
    call("rms_norm.default", real(*X), [24], real(24), 1e-6),
)

ATTENTION: tuple[Sample, ...] = (
    _attention(scale=0.5),
    _attention(mask=flags(4, 1, 12, 24) | torch.eye(12, 24, dtype=torch.bool)),
    _attention(mask=real(12, 12, 24), scale=1.0),
    _attention(mask=real(1, 12, 1, 24)),
    _attention(is_causal=True),
    _attention(key_heads=4, enable_gqa=True, is_causal=True),
    _attention(key_heads=1, enable_gqa=True),
    _attention(key_heads=2, enable_gqa=True, dropout_p=0.4),
    _attention(dropout_p=0.4, is_causal=True),
    _attention(dropout_p=0.4, mask=real(1, 12, 1, 24)),
    call("scaled_dot_product_attention.default", real(12, 24, 3), real(12, 6, 3), real(12, 6, 5)),
)


INDEX: tuple[Sample, ...] = (
    call("embedding.default", real(24, 12), whole(24, 4, 12)),
    call("embedding.default", real(24, 12), whole(24, 4, 12), 5),
    call("embedding.default", real(24, 12), whole(24, 4, 12), 0, False, False),
    call("index_select.default", real(*X), 1, whole(12, 24)),
    call("index.Tensor", real(24, 12, 4), [whole(24, 36)]),
    call("index.Tensor", real(4, 12, 24), [None, whole(12, 24, 1), whole(24, 12)]),
    call("index.Tensor", real(4, 12, 24), [whole(4, 12), None, whole(24, 1)]),
    call("gather.default", real(12, 24), 1, whole(24, 12, 36)),
    call("gather.default", real(24, 12), 1, whole(12, 12, 36)),
    call("index_add.default", real(*X), 1, whole(12, 36), real(4, 36, 24)),
    call("index_add.default", real(24, 12), 0, whole(24, 36), real(36, 12), alpha=2),
    call("index_add.default", real(24, 12, grad=False), 0, whole(24, 48), real(48, 12)),
    call("index_select.default", real(24, 12), 0, whole(24, 36)),
    call("index.Tensor", real(24, 12, 4), [whole(24, 36) - 12, whole(12, 36)]),
    call("index_put.default", real(24, 12, 4), [permuted(24)[:12], whole(12, 12)], real(12, 4)),
    call("index_put.default", real(48, 12), [permuted(48)[:24] - 48], real(24, 12), False),
    call("index_put.default", real(24, 12), [whole(24, 36)], real(36, 12), True),
    call("index_put.default", real(24, 12), [whole(24, 36)], real(36, 1), True),
    call("index_put.default", real(*X), [None, permuted(12)[:3], permuted(24)[:3]], real()),
    call("scatter.value", real(*X), 2, whole(24, 4, 12, 2), 1.0),
    call("scatter.value", real(*X), -1, whole(24, 4, 6, 2), 0),
    call("scatter.src", real(*X), 1, places(12, 4, 6, 24), real(4, 6, 24)),
    call("scatter.src", real(*X), 1, places(12, 4, 6, 12), real(4, 12, 24, grad=False)),
    call("scatter_add.default", real(*X), 1, whole(12, 4, 36, 24), real(4, 36, 24)),
    call("scatter_add.default", real(*X), 1, whole(12, 4, 24, 24), real(4, 36, 24, grad=False)),
    call("scatter_reduce.two", real(*X), 1, whole(12, 4, 6, 24), real(4, 6, 24), "amax"),
    call(
        "scatter_reduce.two",
        *(real(4, 3, 24), 1, whole(3, 4, 12, 24), real(4, 12, 24), "mean"),
        include_self=False,
    ),
    call("index_fill.int_Scalar", real(*X), 1, whole(12, 3), 2.0),
    call("index_copy.default", real(*X), 1, permuted(12)[:3], real(4, 3, 24)),
    call("one_hot.default", whole(5, 12, 24), 5),
)

SHAPE: tuple[Sample, ...] = (
    call("broadcast_tensors.default", [real(12, 24), real(24, seed=9), real(4, 1, 1)]),
    call("view.default", real(4, 12, 24), [48, -1]),
    call("view.default", real(48, 24), [4, 12, 24]),
    call("view.default", real(4, 6, 72), [4, 6, 3, 24]),
    call("view.default", real(4, 6, 12, 2), [24, 24]),
    call("view.default", real(6, 4, 1), [4, 6]),
    call("_unsafe_view.default", real(4, 6, 12, 2), [4, 6, 24]),
    call("reshape.default", real(4, 6, 12, 2), [8, 3, 24]),
    call("unflatten.int", real(4, 72, 2), -2, [3, -1]),
    call("flatten.using_ints", real(4, 6, 12), 1, 2),
    call("expand.default", real(4, 1, 24), [4, 12, -1]),
    call("expand.default", real(1, 24), [4, 12, 24]),
    call("t.default", real(12, 24)),
    call("t.default", real(12)),
    call("transpose.int", real(*X), 1, -1),
    call("permute.default", real(*X), [2, 0, -2]),
    call("unsqueeze.default", real(*X), -2),
    call("squeeze.default", real(4, 1, 12)),
    call("squeeze.dim", real(4, 1, 12), 1),
    call("squeeze.dim", real(4, 1, 12), 0),
    call("squeeze.dims", real(1, 12, 1), [0, 2]),
    call("select.int", real(*X), 1, -1),
    call("slice.Tensor", real(*X), 1, 0, 6),
    call("slice.Tensor", real(*X), 1, 0, 12),
    call("slice.Tensor", real(*X), -1, 0, 12, 2),
    call("slice.Tensor", real(*X), 2, -5, 9223372036854775807),
    call("slice.Tensor", real(*X)),
    call("flip.default", real(*X), [1]),
    call("roll.default", real(*X), [3], [-1]),
    call("roll.default", real(*X), [3]),
    call("tril.default", real(*X)),
    call("triu.default", real(*X), 1),
    call("pad.default", real(*X), [0, 0, 1, -1]),  # a shift
    call("pad.default", real(*X), [0, 1, 2, 0], "constant", -100.0),
    call("constant_pad_nd.default", real(*X), [1, 0]),
    call("cat.default", [real(*X, seed=k) for k in range(3)], 1),
    call("cat.default", [real(4, 12), real(4, 6)], -1),
    call("stack.default", [real(*X, seed=k) for k in range(2)], 1),
    call("cat.default", [real(4, 12, 1, seed=k) for k in range(3)], -1),
    call("split.Tensor", real(4, 12, 3), 1, -1),
    call("split.Tensor", real(4, 12, 72), 24, 2),
    call("split.Tensor", real(4, 12, 24), 10, -1),
    call("split_with_sizes.default", real(4, 12, 72), [36, 36], -1),
    call("split_with_sizes.default", real(4, 12, 24), [4, 20], -1),
    call("chunk.default", real(4, 12, 72), 3, -1),
    call("diagonal.default", real(4, 12, 3, 3), 1, -2, -1),
    call("diagonal.default", real(3, 3, 12)),
    call("diag_embed.default", real(4, 12, 3)),
    call("glu.default", real(4, 24, 6)),
    call("glu.default", real(4, 48, 6), 1),
    call("unbind.int", real(4, 3, 12), 1),
    call("repeat_interleave.self_int", real(4, 12), 3, 1),
    call("repeat_interleave.self_int", real(4, 12), 3, 1, output_size=36),
    call("repeat_interleave.self_int", real(4, 12), 3),
    call("repeat_interleave.self_int", real(4, 1, 6), 8, 1),
    call("repeat_interleave.self_int", real(4, 1, 6), 8, -2, output_size=8),
    call("repeat.default", real(4, 12), [2, 1, 3]),
    call("slice_scatter.default", real(*X), real(4, 7, 24), 1, 5, 12),
    call("select_scatter.default", real(*X), real(4, 24), 1, 3),
    call("zeros.default", [4, 12], dtype=torch.float64),
    call("ones.default", [24], dtype=torch.bool),
    call("full.default", [4, 12, 2], 2.0, dtype=torch.float64),
)

SAMPLES: tuple[Sample, ...] = (
    *POINTWISE,
    *COMPLEX,
    *WINDOWS,
    *CONTRACTION,
    *REDUCTION,
    *RECURRENCE,
    *LINALG,
    *NORMALIZATION,
    *SPATIAL,
    *ATTENTION,
    *EXPERTS,
    *CHECKS,
    *FUSED,
    *INDEX,
    *BAGS,
    *LOSS,
    *SHAPE,
    *RANDOM,
    *RING,
)
