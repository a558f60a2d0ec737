"""Which functions of torch do to a shard what they would do to the whole tensor.

    number by number    add, exp, clamp, where: torch tags these ops `pointwise`
    as it lies          copies, casts, shapes, memory made like another
    all at once         norm, sum, matmul, sort, p[3]: they would see this rank's shard as if it
                        were all
    at random           normal_, uniform_: every rank would draw numbers of its own

A function that is not known to be of the first two kinds is not taken to be one.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

_ALIASES = frozenset(
    "absolute arccos arccosh arcsin arcsinh arctan arctan2 arctanh divide multiply subtract "
    "negative fix greater greater_equal less less_equal not_equal floor_divide isclose isreal "
    "log_sigmoid logsigmoid softsign tanhshrink hardsigmoid hardswish "
    "special_digamma special_erf special_erfc special_erfinv special_exp2 special_expit "
    "special_expm1 special_gammainc special_gammaincc special_gammaln special_i0 special_log1p "
    "special_logit special_multigammaln special_ndtr special_polygamma special_psi special_round "
    "special_sinc special_xlogy "
    "and or xor invert lshift rshift floordiv mod truediv pos "
    "radd rsub rmul rdiv rtruediv rfloordiv rmod rpow rand ror rxor rlshift rrshift".split()
)
"""Number by number, without the tag."""

_IN_PLACE = frozenset(
    "iadd isub imul idiv itruediv ifloordiv imod ipow iand ior ixor ilshift irshift".split()
)
"""`p -= x` and its kin."""

_AS_IT_LIES = frozenset(
    "to type type_as cpu cuda xpu mtia ipu float double half bfloat16 int long short byte char "
    "bool cfloat cdouble chalf complex polar real imag conj adjoint resolve_conj resolve_neg "
    "view_as_real view_as_complex is_complex contiguous copy alias_copy detach detach_copy clone "
    "expand expand_as expand_copy broadcast_to broadcast_tensors pin_memory share_memory fill zero "
    "constant ones zeros zeros_like ones_like full_like empty_like empty_permuted new_empty "
    "new_empty_strided new_full new_ones new_zeros new_tensor new "
    "view view_as view_copy reshape reshape_as flatten ravel unflatten squeeze squeeze_copy "
    "unsqueeze unsqueeze_copy permute permute_copy transpose transpose_copy t t_copy swapaxes "
    "swapdims movedim moveaxis atleast_1d atleast_2d atleast_3d cat concat concatenate stack "
    "hstack vstack dstack column_stack row_stack "
    "dim ndimension size numel nelement len element_size stride storage_offset storage_type "
    "storage untyped_storage typed_storage get_device data_ptr const_data_ptr dim_order layout "
    "is_contiguous is_floating_point is_signed is_inference is_pinned is_shared is_conj is_neg "
    "grad is_same_size is_set_to is_tensor is_storage is_view is_distributed has_names result_type "
    "can_cast promote_types set module_load requires_grad retain_grad backward register_hook "
    "register_post_accumulate_grad_hook record_stream get set delete hash repr format str dir "
    "reduce_ex reduce setstate deepcopy".split()
)
"""Data where it lies, its form, and what torch remembers of it."""

_SEES_ALL = frozenset({"equal", "rrelu"})
"""Tagged `pointwise` by torch, and not number by number."""

_ONE_NUMBER = frozenset("item bool float int index complex long nonzero".split())
"""Dunders and methods that take a tensor of one number."""

_DRAWS = frozenset(
    "normal uniform bernoulli cauchy exponential geometric log_normal random poisson binomial "
    "multinomial rand_like randn_like randint_like dropout alpha_dropout feature_dropout "
    "feature_alpha_dropout rrelu kaiming_normal kaiming_uniform xavier_normal xavier_uniform "
    "trunc_normal no_grad_normal no_grad_uniform no_grad_trunc_normal".split()
)

_FUSED = "fused_"
"""Steps of optimizers as one kernel."""


def draws(function: Callable[..., Any]) -> bool:
    """Whether it makes random numbers."""
    return _bare_name(function) in _DRAWS


def looks_for_inf(function: Callable[..., Any]) -> bool:
    """Whether it is what a GradScaler calls with gradients."""
    return _bare_name(function).startswith("amp_foreach_non_finite_check")


@dataclass(frozen=True)
class Work:
    """What a function does. is_safe: in every call what it would do to the whole, as far as is
    known; None where its arguments decide. makes_another: what it makes has nothing of the shard
    but its dtype and device. is_in_place: it gives back its first argument."""

    is_safe: bool | None
    makes_another: bool
    is_in_place: bool


@lru_cache(maxsize=4096)
def work_of(function: Callable[..., Any]) -> Work:
    """See Work. Optimizers ask for one attribute or another of every parameter in every step."""
    name, full = _bare_name(function), getattr(function, "__name__", "")
    depends = name in _DEPENDS or name in _ONE_NUMBER or looks_for_inf(function)
    is_safe = None if depends else _is_known(name) or _is_of_another_library(function)
    is_in_place = full.endswith("_") and (not full.endswith("__") or name in _IN_PLACE)
    return Work(is_safe, name.startswith("new_"), is_in_place)


def is_number_by_number(
    function: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> bool:
    """Whether this call does to shards what it does to the whole, as far as is known."""
    is_safe = work_of(function).is_safe
    if is_safe is not None:
        return is_safe
    name = _bare_name(function)
    if name in ("getitem", "setitem"):
        return _takes_numbers_as_they_lie(arguments[0], arguments[1])
    if name in _ONE_NUMBER and isinstance(arguments[0], Tensor) and arguments[0].numel() == 1:
        return True
    if looks_for_inf(function):
        return _is_by_sharded_scaler()
    others = [*arguments[1:], *keywords.values()]
    if name in ("max", "min"):  # of one tensor a reduction, of two number by number
        return any(isinstance(x, Tensor) for x in others)
    if name == "where":  # of a condition alone it is nonzero
        return bool(others)
    return _is_known(name)


_DEPENDS = frozenset({"getitem", "setitem", "max", "min", "where"})


@cache
def _is_known(name: str) -> bool:
    if name in _SEES_ALL:
        return False
    if name in _ALIASES or name in _IN_PLACE or name in _AS_IT_LIES or name.startswith(_FUSED):
        return True
    return any(_is_tagged(x) for x in (name, f"{name}_", f"__{name}__"))


def _is_tagged(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if packet is not None else ()
    return any(torch.Tag.pointwise in getattr(packet, x).tags for x in overloads)


def _bare_name(function: Callable[..., Any]) -> str:
    """`add` of Tensor.add_, Tensor.__add__, torch._foreach_add_ and torch.ops.aten.add.Tensor."""
    name = getattr(function, "__name__", "")
    if isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        name = name.split(".")[0]
    return name.strip("_").removeprefix("foreach_")


def _is_of_another_library(function: Callable[..., Any]) -> bool:
    """An op of which nothing is known: that of an optimizer, of a user."""
    if not isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return False
    return not str(function).startswith(("aten.", "prims."))


def _is_by_sharded_scaler() -> bool:
    """Whether who calls tells the other ranks of an inf: torch's other scaler would leave out a
    step that they take."""
    frame: FrameType | None = sys._getframe()
    for _ in range(_DEPTH):
        if frame is None:
            return False
        if isinstance(frame.f_locals.get("self"), ShardedGradScaler):
            return True
        frame = frame.f_back
    return False


_DEPTH = 12
"""Calls between a scaler and this function, at the most."""


def _takes_numbers_as_they_lie(tensor: Any, index: Any) -> bool:
    """Whether x[index] names no place by its number: p[...], p[:, None], p[p > 0]."""
    if isinstance(index, Tensor):
        return index.dtype == torch.bool and index.shape == tensor.shape
    parts = index if isinstance(index, tuple) else (index,)
    return all(x is None or x is Ellipsis or x == slice(None) for x in parts)
