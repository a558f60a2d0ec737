"""A representative call of every op in the rule table, small enough for many simulated ranks.

Dims are 12 or multiples, so that axes of 2, 3 and 4 ranks divide them.
"""

from collections.abc import Callable
from typing import Any

import torch
from support_ops import SingleOp
from support_tensors import few, flags, halves, one, places, real, special, steps, targets, whole
from torch import Tensor

from meshfold.passes.rules_pointwise import BINARY, UNARY

X = (4, 12, 24)
Sample = tuple[str, Callable[[], SingleOp]]


def _call(target: str, *args: Any, **kwargs: Any) -> Sample:
    """A sample whose arguments may be functions that make tensors."""
    return target, lambda: SingleOp(f"aten.{target}", *args, **kwargs)


def _binary(name: str) -> Sample:
    """An elementwise function of two tensors, or of a tensor and a number."""
    if name == "floor_divide.default":
        return _call(name, whole(99, *X), 1 + whole(9, 12, 1))
    if name.startswith(("_", "bitwise", "logical")):
        # What leaves the flags as they are: True for and, False for or.
        scalar = "and" in name
        return _call(name, flags(*X), scalar if name.endswith("Scalar") else flags(12, 1))
    x, other = (halves(*X), halves(12, 1)) if name in _EQUALITIES else (real(*X), real(12, 1))
    return _call(name, x, 0.5 if name.endswith("Scalar") else other)


_EQUALITIES = ("eq.Scalar", "ne.Scalar", "eq.Tensor", "ne.Tensor")
_ROUNDING = ("ceil", "floor", "round", "sign", "trunc")


def _unary(name: str) -> Sample:
    if "not" in name:
        return _call(f"{name}.default", flags(*X))
    make = special if name.startswith("is") else steps if name in _ROUNDING else real
    return _call(f"{name}.default", make(*X))


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
    return _call(name, query, key, value.requires_grad_(), mask, **kwargs)


def _logits(*shape: int) -> Tensor:
    return (9 * real(*shape).detach()).requires_grad_()


POINTWISE: tuple[Sample, ...] = (
    *(_unary(name) for name in UNARY),
    *(_binary(name) for name in BINARY),
    _call("neg.default", real(*X)),
    _call("alias.default", real(*X)),
    _call("detach.default", real(*X)),
    _call("lift_fresh_copy.default", real(*X)),
    _call("clone.default", real(*X), memory_format=torch.contiguous_format),
    _call("contiguous.default", real(*X)),
    _call("_to_copy.default", real(*X), dtype=torch.float64),
    _call("_to_copy.default", flags(*X), dtype=torch.float64),
    _call("add.Tensor", real(*X), real(12, 24), alpha=2),
    _call("add.Tensor", real(*X), 1.5),
    _call("add.Tensor", real(4, 12, 1), real(1, 24)),
    _call("add.Tensor", whole(9, 4, 12), whole(9, 12)),
    _call("sub.Tensor", real(*X), real(*X, seed=8)),
    _call("rsub.Scalar", real(*X), 2.0),
    _call("mul.Tensor", real(*X), real(4, 1, 24)),
    _call("mul.Tensor", real(*X), 0.5),
    _call("mul.Tensor", real(*X), flags(12, 24)),
    _call("mul.Scalar", real(*X), 3.0),
    _call("div.Tensor", real(*X), real(*X, seed=8)),
    _call("div.Tensor", real(*X), 3.0),
    _call("div.Tensor_mode", real(*X), 0.03, rounding_mode="floor"),
    _call("div.Tensor_mode", real(*X), real(24), rounding_mode=None),
    _call("where.self", flags(4, 1, 24), real(*X), real(12, 24)),
    _call("where.ScalarOther", flags(12, 24), real(*X), 2.0),
    _call("where.ScalarOther", flags(12, 24), real(*X), 0.0),
    _call("where.ScalarSelf", flags(12, 24), 2.0, real(*X)),
    _call("where.Scalar", flags(12, 24), 2.0, 3.0),
    _call("masked_fill.Scalar", real(*X), flags(12, 24), 0),
    _call("masked_fill.Scalar", real(*X), flags(12, 24), -1.5),
    _call("masked_fill.Tensor", real(*X), flags(12, 24), real()),
    _call("pow.Tensor_Scalar", real(*X), 3.0),
    _call("pow.Tensor_Tensor", real(*X), real(24)),
    _call("gelu.default", real(*X), approximate="tanh"),
    _call("gelu.default", real(*X)),
    _call("clamp.default", real(*X), 0.3, 0.7),
    _call("clamp_min.default", real(*X), 0.4),
    _call("clamp_max.default", real(*X), 0.4),
    _call("leaky_relu.default", real(*X), 0.1),
    _call("softplus.default", real(*X)),
    _call("elu.default", real(*X)),
    _call("hardtanh.default", real(*X), 0.3, 0.7),
    _call("fill.Scalar", real(*X), 2.0),
    _call("fill.Tensor", real(*X), real()),
    _call("copy.default", whole(9, *X), whole(9, 12, 24)),
    _call("zeros_like.default", real(*X), pin_memory=False),
    _call("ones_like.default", real(*X)),
    _call("full_like.default", real(*X), 3.0),
)

CONTRACTION: tuple[Sample, ...] = (
    _call("linear.default", real(4, 12, 24), real(36, 24), real(36)),
    _call("linear.default", real(4, 12, 24), real(36, 24)),
    _call("linear.default", real(24), real(36, 24), real(36)),
    _call("linear.default", real(12, 24), real(24), None),
    _call("addmm.default", real(36), real(24, 12), real(12, 36)),
    _call("addmm.default", real(24, 1), real(24, 12), real(12, 36), beta=2, alpha=3),
    _call("baddbmm.default", real(1, 24, 36), real(4, 24, 12), real(4, 12, 36), beta=0.5),
    _call("mm.default", real(24, 12), real(12, 36)),
    _call("bmm.default", real(12, 24, 12), real(12, 12, 4)),
    _call("matmul.default", real(4, 12, 24), real(24, 12)),
    _call("matmul.default", real(4, 1, 12, 24), real(12, 24, 12)),
    _call("matmul.default", real(24), real(24, 12)),
    _call("matmul.default", real(12, 24), real(24)),
    _call("matmul.default", real(24), real(24)),
    _call("einsum.default", "bsd,edh->besh", [real(4, 3, 12), real(12, 12, 4)]),
    _call("einsum.default", "bsd, bs -> d", [real(4, 12, 12), real(4, 12)]),
    _call("einsum.default", "ij,jk,kl->il", [real(4, 12), real(12, 24), real(24, 2)]),
    _call("einsum.default", "bhs,hs->bh", [real(4, 12, 24), real(12, 1)]),
    _call("conv1d.default", real(4, 12, 9), real(24, 12, 3), real(24), [2], [1]),
    _call("conv2d.default", real(4, 12, 6, 6), real(24, 12, 3, 3), real(24), [3, 3]),
    _call("conv2d.default", real(4, 12, 6, 6), real(24, 4, 3, 3), None, [1, 1], [1, 1], [1, 1], 3),
    _call("conv2d.default", real(4, 24, 4, 4), real(12, 2, 3, 3), real(12), groups=12),
    _call("conv1d.padding", real(4, 12, 9), real(24, 12, 3), real(24), [1], "same"),
    _call("conv2d.padding", real(4, 12, 4, 4), real(12, 1, 3, 3), None, [1, 1], "same", [1], 12),
    _call("conv3d.padding", real(4, 12, 3, 3, 3), real(12, 12, 2, 2, 2), None, [1], "valid"),
    _call("conv3d.default", real(4, 12, 3, 3, 3), real(12, 12, 2, 2, 2)),
    _call("conv_transpose1d.default", real(4, 12, 5), real(12, 24, 3), real(24), [2]),
    _call("conv_transpose2d.input", real(4, 12, 3, 3), real(12, 2, 2, 2), real(24), groups=12),
    _call("conv_transpose2d.input", real(4, 12, 3, 3), real(12, 24, 2, 2), real(24)),
    _call("conv_transpose3d.input", real(4, 12, 2, 2, 2), real(12, 12, 2, 2, 2)),
)

_STATISTICS = (real(12, grad=False), 1 + real(12, grad=False))

NORMALIZATION: tuple[Sample, ...] = (
    _call(
        "_native_batch_norm_legit_functional.default",
        *(real(24, 12, 2, 3), real(12), real(12), *_STATISTICS, True, 0.3, 1e-5),
    ),
    _call(
        "_native_batch_norm_legit_functional.default",
        *(real(24, 12), None, None, *_STATISTICS, True, 0.1, 1e-3),
    ),
    _call("_native_batch_norm_legit.no_stats", real(24, 12, 2), real(12), real(12), True, 0.1, 0.0),
    _call(
        "_native_batch_norm_legit_no_training.default",
        *(real(24, 12, 2, 3), real(12), real(12), *_STATISTICS, 0.1, 1e-5),
    ),
    _call("_weight_norm.default", real(12, 24, 2), real(1, 1, 2), 2),
    _call("_weight_norm.default", real(12, 24), real(12, 1)),
    _call("group_norm.default", real(12, 24, 2, 2), 12, real(24), real(24), 1e-5, False),
    _call("group_norm.default", real(12, 24, 3), 4),
    _call("group_norm.default", real(12, 24, 3), 1, real(24)),
    _call(
        "instance_norm.default",
        *(real(12, 12, 4), real(12), real(12), None, None, True, 0.1, 1e-5, False),
    ),
)

SPATIAL: tuple[Sample, ...] = (
    _call("max_pool1d.default", real(12, 12, 6), [2]),
    _call("max_pool2d.default", real(4, 12, 6, 6), [3, 3], [2, 2], [1, 1]),
    _call("max_pool2d.default", real(12, 4, 4), [2, 2]),
    _call("max_pool3d.default", real(4, 12, 4, 4, 4), [2]),
    _call("max_pool2d_with_indices.default", real(4, 12, 4, 4), [2, 2], [2, 2]),
    _call("max_pool3d_with_indices.default", real(4, 12, 4, 4, 4), [2]),
    _call("adaptive_max_pool2d.default", real(4, 12, 6, 6), [2, 3]),
    _call("adaptive_max_pool3d.default", real(4, 12, 4, 4, 4), [2, 1, 2]),
    _call("avg_pool1d.default", real(12, 12, 6), [2]),
    _call("avg_pool2d.default", real(4, 12, 6, 6), [3, 3], [2, 2], [1, 1], False, False),
    _call("avg_pool3d.default", real(4, 12, 4, 4, 4), [2]),
    _call("adaptive_avg_pool1d.default", real(4, 12, 6), [2]),
    _call("adaptive_avg_pool2d.default", real(4, 12, 6, 6), [1, 1]),
    _call("adaptive_avg_pool3d.default", real(4, 12, 4, 4, 4), [2, 1, 2]),
    _call("upsample_nearest2d.vec", real(4, 12, 3, 3), None, [2.0, 2.0]),
    _call("upsample_bilinear2d.vec", real(4, 12, 3, 3), [5, 5], True, None),
    _call("pixel_shuffle.default", real(4, 48, 3, 3), 2),
)

REDUCTION: tuple[Sample, ...] = (
    _call("sum.dim_IntList", real(*X), [1], True),
    _call("sum.dim_IntList", real(*X), [0, -1]),
    _call("sum.dim_IntList", flags(*X), [0, -1]),
    _call("sum.dim_IntList", real(*X), [-1], dtype=torch.float64),
    _call("sum.default", real(*X)),
    _call("mean.dim", real(*X), [-1], True),
    _call("mean.dim", real(*X), [0, 1]),
    _call("mean.default", real(*X)),
    _call("amax.default", real(*X), [1]),
    _call("amin.default", real(*X), [1], True),
    _call("max.default", real(*X)),
    _call("min.default", real(*X)),
    _call("max.dim", real(*X), 1),
    _call("min.dim", real(*X), -1, True),
    _call("argmax.default", real(*X), -1),
    _call("argmax.default", real(*X)),
    _call("argmin.default", real(*X), 1, True),
    _call("any.default", one(*X)),
    _call("any.dim", few(*X), 1),
    _call("all.default", ~one(*X)),
    _call("all.dim", ~few(*X), 1),
    _call("logsumexp.default", real(*X), [1]),
    _call("var.correction", real(*X), [1], correction=1, keepdim=True),
    _call("std.correction", real(*X), [1], correction=0),
    _call("linalg_vector_norm.default", real(*X), 2, [2], True),
    _call("softmax.int", real(*X), -1),
    _call("_softmax.default", real(*X), 1, False),
    _call("log_softmax.int", real(*X), -1),
    _call("_log_softmax.default", real(*X), 1, False),
    _call("topk.default", real(*X), 2),
    _call("sort.default", real(*X), 1),
    _call("argsort.default", real(*X), 1),
    _call("cumsum.default", real(*X), 1),
    _call("cumsum.default", flags(*X), -1),
    _call("diff.default", real(*X), 1, 1, real(4, 2, 24)),
    _call("layer_norm.default", real(*X), [24], real(24), 1 + real(24).detach(), 1e-5, False),
    _call("layer_norm.default", real(*X), [12, 24]),
    _call("rms_norm.default", real(*X), [24], real(24), 1e-6),
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
    _call("scaled_dot_product_attention.default", real(12, 24, 3), real(12, 6, 3), real(12, 6, 5)),
)


def _experts(*args: Any, op: str = "expert_linear") -> Sample:
    target = f"meshfold.{op}.default"
    return target, lambda: SingleOp(target, *args)


EXPERTS: tuple[Sample, ...] = (
    _experts(real(24, 12), real(12, 24, 12), whole(12, 24)),
    _experts(real(24, 12), real(12, 24, 12), whole(12, 24), real(12, 24)),
    _experts(real(24, 12), real(12, 12, 36), whole(12, 24), real(12, 36), True),
    # Some experts have no row, and some rows no expert.
    _experts(real(12, 12), real(24, 12, 12), 2 * whole(13, 12), None, False),
    _experts(real(12, 12), real(12, 12, 24, grad=False), whole(12, 12), real(12, 24), True),
    _experts(real(24, 12), whole(12, 24), 12, op="dispatch"),
    _experts(whole(12, 24), whole(12, 24), 12, op="dispatch"),
    _experts(real(24, 12), whole(12, 24), 12, op="combine"),
)

INDEX: tuple[Sample, ...] = (
    _call("embedding.default", real(24, 12), whole(24, 4, 12)),
    _call("embedding.default", real(24, 12), whole(24, 4, 12), 5),
    _call("embedding.default", real(24, 12), whole(24, 4, 12), 0, False, False),
    _call("index_select.default", real(*X), 1, whole(12, 24)),
    _call("index.Tensor", real(24, 12, 4), [whole(24, 36)]),
    _call("index.Tensor", real(4, 12, 24), [None, whole(12, 24, 1), whole(24, 12)]),
    _call("index.Tensor", real(4, 12, 24), [whole(4, 12), None, whole(24, 1)]),
    _call("gather.default", real(12, 24), 1, whole(24, 12, 36)),
    _call("gather.default", real(24, 12), 1, whole(12, 12, 36)),
    _call("index_add.default", real(*X), 1, whole(12, 36), real(4, 36, 24)),
    _call("scatter.value", real(*X), 2, whole(24, 4, 12, 2), 1.0),
    _call("scatter.value", real(*X), -1, whole(24, 4, 6, 2), 0),
    _call("scatter.src", real(*X), 1, places(12, 4, 6, 24), real(4, 6, 24)),
    _call("scatter.src", real(*X), 1, places(12, 4, 6, 12), real(4, 12, 24, grad=False)),
    _call("scatter_add.default", real(*X), 1, whole(12, 4, 36, 24), real(4, 36, 24)),
    _call("scatter_add.default", real(*X), 1, whole(12, 4, 24, 24), real(4, 36, 24, grad=False)),
    _call("one_hot.default", whole(5, 12, 24), 5),
)

LOSS: tuple[Sample, ...] = (
    _call("cross_entropy_loss.default", _logits(24, 36), targets(24, 36)),
    _call("cross_entropy_loss.default", _logits(24, 36), targets(24, 36), None, 2),
    _call("cross_entropy_loss.default", _logits(24, 36), targets(24, 36), None, 0),
    _call("cross_entropy_loss.default", _logits(24, 36), whole(36, 24), None, 1, 4),
    _call("cross_entropy_loss.default", _logits(12, 24, 4), targets(48, 24).reshape(12, 4)),
)

SHAPE: tuple[Sample, ...] = (
    _call("view.default", real(4, 12, 24), [48, -1]),
    _call("view.default", real(48, 24), [4, 12, 24]),
    _call("view.default", real(4, 6, 72), [4, 6, 3, 24]),
    _call("view.default", real(4, 6, 12, 2), [24, 24]),
    _call("view.default", real(6, 4, 1), [4, 6]),
    _call("_unsafe_view.default", real(4, 6, 12, 2), [4, 6, 24]),
    _call("reshape.default", real(4, 6, 12, 2), [8, 3, 24]),
    _call("unflatten.int", real(4, 72, 2), -2, [3, -1]),
    _call("flatten.using_ints", real(4, 6, 12), 1, 2),
    _call("expand.default", real(4, 1, 24), [4, 12, -1]),
    _call("expand.default", real(1, 24), [4, 12, 24]),
    _call("t.default", real(12, 24)),
    _call("t.default", real(12)),
    _call("transpose.int", real(*X), 1, -1),
    _call("permute.default", real(*X), [2, 0, -2]),
    _call("unsqueeze.default", real(*X), -2),
    _call("squeeze.default", real(4, 1, 12)),
    _call("squeeze.dim", real(4, 1, 12), 1),
    _call("squeeze.dim", real(4, 1, 12), 0),
    _call("squeeze.dims", real(1, 12, 1), [0, 2]),
    _call("select.int", real(*X), 1, -1),
    _call("slice.Tensor", real(*X), 1, 0, 6),
    _call("slice.Tensor", real(*X), 1, 0, 12),
    _call("slice.Tensor", real(*X), -1, 0, 12, 2),
    _call("slice.Tensor", real(*X), 2, -5, 9223372036854775807),
    _call("slice.Tensor", real(*X)),
    _call("flip.default", real(*X), [1]),
    _call("roll.default", real(*X), [3], [-1]),
    _call("roll.default", real(*X), [3]),
    _call("tril.default", real(*X)),
    _call("triu.default", real(*X), 1),
    _call("pad.default", real(*X), [0, 1], "constant", 0.0),
    _call("pad.default", real(*X), [0, 1, 2, 0], "constant", -100.0),
    _call("constant_pad_nd.default", real(*X), [1, 0]),
    _call("cat.default", [real(*X, seed=k) for k in range(3)], 1),
    _call("cat.default", [real(4, 12), real(4, 6)], -1),
    _call("stack.default", [real(*X, seed=k) for k in range(2)], 1),
    _call("split.Tensor", real(4, 12, 72), 24, 2),
    _call("split.Tensor", real(4, 12, 24), 10, -1),
    _call("split_with_sizes.default", real(4, 12, 72), [36, 36], -1),
    _call("split_with_sizes.default", real(4, 12, 24), [4, 20], -1),
    _call("chunk.default", real(4, 12, 72), 3, -1),
    _call("unbind.int", real(4, 3, 12), 1),
    _call("repeat_interleave.self_int", real(4, 12), 3, 1),
    _call("repeat_interleave.self_int", real(4, 12), 3, 1, output_size=36),
    _call("repeat_interleave.self_int", real(4, 12), 3),
    _call("repeat.default", real(4, 12), [2, 1, 3]),
    _call("slice_scatter.default", real(*X), real(4, 7, 24), 1, 5, 12),
    _call("select_scatter.default", real(*X), real(4, 24), 1, 3),
    _call("new_zeros.default", real(*X), [4, 12], pin_memory=False),
    _call("new_ones.default", real(*X), [], dtype=torch.bool),
    _call("new_full.default", real(*X), [4], 2.0),
    _call("new_empty.default", real(*X), [0]),
)

RANDOM: tuple[Sample, ...] = (
    _call("dropout.default", real(*X), 0.3, True),
    _call("dropout.default", real(*X), 0.3, False),
    _call("native_dropout.default", real(*X), 0.3, True),
)

SAMPLES: tuple[Sample, ...] = (
    *POINTWISE,
    *CONTRACTION,
    *REDUCTION,
    *NORMALIZATION,
    *SPATIAL,
    *ATTENTION,
    *EXPERTS,
    *INDEX,
    *LOSS,
    *SHAPE,
    *RANDOM,
)
