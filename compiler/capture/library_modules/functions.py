"""Functions of torch that a trace takes in another form: ops of fixed shape that have rules.

Each is given a call, (function, args, kwargs), and returns NotImplemented for all but its own.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from meshfold.torch_compat.functional_gradients import is_inside_vmap

Keep = Callable[[Tensor, str], object]
"""Takes a condition on values as a check of the program, with what it says."""


def in_ops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], keep: Keep) -> Any:
    """What one of the functions here returns."""
    if func is functional.gaussian_nll_loss:
        return _gaussian_nll_loss(args, kwargs, keep)
    if func in (functional.dropout, torch.dropout_):
        return _dropout_in_place(func, args, kwargs)
    if func is _LINEAR_CROSS_ENTROPY:
        return _unchunked(args, kwargs)
    if func in _STATISTICS:
        return _STATISTICS[func](args, kwargs)
    if func in _PRODUCTS and is_inside_vmap():
        return _product_in_vmap(args, kwargs)
    return NotImplemented


_LINEAR_CROSS_ENTROPY: Any = getattr(functional, "linear_cross_entropy", torch)
"""Of torch 2.13 and later; of older ones something that nobody calls."""


def _unchunked(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A linear layer and a cross entropy, whose chunks are for the planner to choose."""
    if kwargs.get("options") is None:
        return NotImplemented
    return _LINEAR_CROSS_ENTROPY(*args, **{**kwargs, "options": None})


def _dropout_in_place(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What dropout(x, p, training, inplace=True) returns: x, with the result of the op dropout
    copied into it, where torch writes draws and products."""
    names = ("input", "p", "training", "inplace")
    given = {"p": 0.5, "training": True, "inplace": False, **dict(zip(names, args, strict=False))}
    given |= kwargs
    is_in_place = given.pop("inplace") or func is torch.dropout_
    x = given.pop("input")
    if not is_in_place or not given["training"]:
        return NotImplemented
    return x.copy_(functional.dropout(x, given["p"], True))


def _gaussian_nll_loss(args: Sequence[Any], kwargs: Mapping[str, Any], keep: Keep) -> Any:
    """The loss as torch computes it, with its look at the variances as a check; NotImplemented for
    variances of a form that torch refuses."""
    names = ("input", "target", "var", "full", "eps", "reduction")
    given: dict[str, Any] = {"full": False, "eps": 1e-6, "reduction": "mean"}
    given |= dict(zip(names, args, strict=False)) | dict(kwargs)
    x, target, variance = given["input"], given["target"], given["var"]
    if not isinstance(variance, Tensor):
        return NotImplemented
    keep((variance >= 0).all(), "gaussian_nll_loss: no variance is below 0")
    if variance.shape == x.shape[:-1]:
        variance = variance.unsqueeze(-1)
    pairs = zip(variance.shape, x.shape, strict=False)
    if variance.ndim != x.ndim or any(v not in (1, n) for v, n in pairs):
        return NotImplemented
    # A variance below eps is taken for eps, and has the gradient of what it was.
    variance = variance + (variance.clamp(min=given["eps"]) - variance).detach()
    loss = 0.5 * (variance.log() + (x - target) ** 2 / variance)
    if given["full"]:
        loss = loss + 0.5 * math.log(2 * math.pi)
    reduction = given["reduction"]
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


def _covariance(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """torch.cov of [variables, observations] or [observations] without weights; torch makes
    its divisor a tensor, and asks whether that is above 0."""
    x, correction = args[0] if args else kwargs["input"], kwargs.get("correction", 1)
    is_weighted = kwargs.get("fweights") is not None or kwargs.get("aweights") is not None
    if is_weighted or x.ndim not in (1, 2) or x.shape[-1] <= correction or x.is_complex():
        return NotImplemented
    rows = x.reshape(-1, x.shape[-1])
    centered = rows - rows.mean(1, keepdim=True)
    return (centered @ centered.T / (x.shape[-1] - correction)).squeeze()


def _correlation(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """torch.corrcoef of rows [variables, observations]."""
    covariance = _covariance(args, kwargs)
    if covariance is NotImplemented or covariance.ndim == 0:
        return NotImplemented if covariance is NotImplemented else covariance / covariance
    deviations = covariance.diagonal().sqrt()
    found = covariance / deviations.unsqueeze(1) / deviations.unsqueeze(0)
    # As in torch, what rounding puts beyond 1 is 1, without a gradient there.
    return found.clamp(-1, 1)


def _product_in_vmap(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A product with a vector as one with a matrix: inside of vmap, export sees nothing of mv."""
    a, b = (*args, *(kwargs[name] for name in ("input", "vec", "other") if name in kwargs))
    if a.ndim > 1 and b.ndim == 1:
        return (a @ b.unsqueeze(-1)).squeeze(-1)
    if a.ndim == 1 and b.ndim > 1:
        return (a.unsqueeze(0) @ b).squeeze(-2)
    return NotImplemented


_PRODUCTS = (torch.mv, Tensor.mv, torch.matmul, Tensor.matmul, Tensor.__matmul__)
_STATISTICS = {
    torch.cov: _covariance,
    Tensor.cov: _covariance,
    torch.corrcoef: _correlation,
    Tensor.corrcoef: _correlation,
}
