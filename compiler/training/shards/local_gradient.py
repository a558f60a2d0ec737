"""The gradient of a parameter of which this rank holds a shard, or which other ranks do not hold.

Work on it number by number, as of SGD and AdamW, is what it would be on the whole gradient. What
reads several numbers at once (norms, means, products of matrices) would see this rank's shard as if
it were all: torch.nn.utils.clip_grad_norm_, Adafactor and Muon are refused in one line.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from meshfold.errors import OptionError

_REDUCTIONS = frozenset(
    "norm sum mean std var std_mean var_mean nansum nanmean median nanmedian mode quantile "
    "nanquantile prod amax amin aminmax argmax argmin logsumexp softmax log_softmax cumsum cumprod "
    "cummax cummin logcumsumexp sort argsort msort topk kthvalue unique histc bincount all any "
    "count_nonzero nonzero equal allclose dist cdist trace renorm foreach_norm foreach_max "
    "matmul rmatmul mm bmm mv dot vdot inner einsum tensordot chain_matmul addmm addbmm baddbmm "
    "addmv matrix_exp det logdet inverse pinverse svd qr cholesky lu cov corrcoef diff cross "
    "normalize".split()
)
"""Functions and methods of torch that read several numbers at once, without underscores around."""


class LocalGradient(Tensor):
    """A gradient, with the memory of the tensor that it was made of."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Any = None,
    ) -> Any:
        name = getattr(func, "__name__", "").strip("_")
        # torch.max of one tensor is a reduction, of two it compares number by number.
        reduces = name in ("max", "min") and not any(isinstance(x, Tensor) for x in args[1:])
        if reduces or name in _REDUCTIONS or name.startswith("linalg_"):
            raise OptionError(
                f"{name} of gradients of which this rank holds a shard, or a stage's: it would see "
                "no more than that; clip with model.clip_grad_norm_, train with an optimizer that "
                "works number by number (AdamW, SGD), or take the shard: "
                "gradient.as_subclass(torch.Tensor)"
            )
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LocalGradient({local_tensor(self)!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return local_tensor(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def local_tensor(x: Tensor) -> Tensor:
    """The plain tensor of a gradient, in the same memory."""
    return x.as_subclass(Tensor)


def mark_gradient(parameter: Tensor) -> None:
    """Makes `.grad` a LocalGradient: a hook of the accumulation of gradients."""
    gradient = parameter.grad
    if gradient is not None and not isinstance(gradient, LocalGradient):
        parameter.grad = gradient.as_subclass(LocalGradient)


def guard_gradients(parameter: Tensor) -> None:
    """From here on gradients that a backward gives the parameter are LocalGradients."""
    if parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(mark_gradient)  # type: ignore[no-untyped-call]
