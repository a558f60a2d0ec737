"""Which functions of torch work on every row by itself, by name, and how their dims are given.

A function of torch has one name here however it is called: torch.relu, Tensor.relu and
functional.relu are "relu", and x + y is "add".
"""

from collections.abc import Mapping
from typing import Any

ELEMENTWISE = frozenset(
    (
        *("add", "radd", "sub", "rsub", "mul", "rmul", "div", "truediv", "rtruediv", "rdiv"),
        *("true_divide", "subtract", "multiply", "divide", "pow", "rpow", "floordiv", "remainder"),
        *("neg", "negative", "abs", "exp", "expm1", "log", "log1p", "log2", "log10", "sqrt"),
        *("rsqrt", "square", "reciprocal", "sigmoid", "logsigmoid", "tanh", "relu", "leaky_relu"),
        *("gelu", "silu", "mish", "elu", "selu", "softplus", "relu6", "hardtanh", "hardswish"),
        *("sin", "cos", "erf", "sign", "round", "floor", "ceil", "nan_to_num", "atan2", "xlogy"),
        *("clamp", "clip", "clamp_min", "clamp_max", "minimum", "maximum", "where"),
        *("masked_fill", "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or"),
        *("logical_not", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_not", "and", "or"),
        *("invert", "isnan", "isinf", "isfinite", "float", "double", "half", "bfloat16", "long"),
        *("int", "bool", "to", "type", "type_as", "detach", "contiguous", "clone", "dropout"),
    )
)
"""One element of the result from one element of each operand, which broadcast."""

ALONG_DIMS: Mapping[str, tuple[int, Any, int]] = {
    **dict.fromkeys(("softmax", "log_softmax", "sum", "mean", "amax", "amin"), (1, None, 0)),
    **dict.fromkeys(("argmax", "argmin", "logsumexp", "gather", "squeeze"), (1, None, 0)),
    "unsqueeze": (1, None, 1),
    "norm": (2, None, 0),
    "normalize": (2, 1, 0),
    "cosine_similarity": (2, 1, 0),
}
"""Functions along dims of a row: the place and default of their argument `dim`, and how many dims
their result has more."""

OF_LAST_DIMS = frozenset(("linear", "matmul", "layer_norm", "rms_norm", "embedding", "one_hot"))
"""Functions of the last dims of their first operand; other operands are the same for all rows."""

INDEXED = frozenset(("gather", "embedding", "one_hot"))
"""Functions that take whole numbers as places, which must exist for every row."""

LOSSES = frozenset(
    (
        *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "soft_margin_loss"),
        *("binary_cross_entropy", "binary_cross_entropy_with_logits", "poisson_nll_loss"),
    )
)
"""Losses of torch.nn.functional that are reduced over losses of elements."""

CLASS_LOSSES = frozenset(("cross_entropy", "nll_loss"))
"""Losses over classes, which leave out targets of `ignore_index`."""


def name_of(func: Any) -> str:
    """The name of a function of torch in the tables here."""
    return str(getattr(func, "__name__", func)).strip("_")
