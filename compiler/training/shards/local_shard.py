"""A parameter or gradient of which this rank holds a shard, or which other ranks do not hold.

Work on it number by number, as of SGD and AdamW, is what it would be on the whole. What reads
several numbers at once (norms, means, products of matrices) would see this rank's shard as if it
were all, and random numbers would be each rank's own: torch.nn.utils.clip_grad_norm_, LAMB,
Adafactor, Muon, a penalty on the norm of a parameter and torch.nn.init are refused in one line.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from meshfold.errors import OptionError
from meshfold.torch_compat.tensor_subclasses import (
    let_optimizers_fuse,
    on_plain_tensors,
    plain_tensor,
)
from meshfold.training.shards.number_by_number import (
    draws,
    is_number_by_number,
    looks_for_inf,
    work_of,
)


class LocalShard(Tensor):
    """A parameter or gradient, with the memory of the tensor that it was made of. What is computed
    of it is one too."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Any = None,
    ) -> Any:
        work = work_of(func)
        if work.is_safe is not True and not is_number_by_number(func, args, kwargs or {}):
            raise OptionError(_refusal(func))
        if len(types) > 1 and not all(issubclass(cls, kind) for kind in types):
            return NotImplemented  # DTensors and the like
        if getattr(func, "__name__", "") == "register_hook":
            args = (args[0], _on_shards(args[1]), *args[2:])
        with on_plain_tensors():
            result = func(*args, **(kwargs or {}))
        if work.makes_another:
            return result
        # Of `p -= x` and `p.add_(x)` the result is p itself, of whatever class it is.
        if work.is_in_place and args and isinstance(result, Tensor | list | tuple):
            return args[0]
        return _as_shards(result)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LocalShard({local_tensor(self)!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        values = local_tensor(self.detach())
        if isinstance(self, nn.Parameter):
            return nn.Parameter(values, self.requires_grad).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
        return values.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        values = local_tensor(self.detach()).clone()
        is_parameter = isinstance(self, nn.Parameter)
        made = local_parameter(values, self.requires_grad) if is_parameter else shard(values)
        if self.grad is not None:
            made.grad = shard(local_tensor(self.grad).clone())
        memo[id(self)] = made
        return made


def _refusal(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", "this function").strip("_")
    if looks_for_inf(function):
        return (
            "a GradScaler of gradients of which this rank holds a shard: it would leave out a step "
            "that other ranks take; take torch.distributed.fsdp.sharded_grad_scaler."
            "ShardedGradScaler"
        )
    if draws(function):
        return (
            f"{name} of numbers of which this rank holds a shard: every rank would draw its own; "
            "initialise the model before meshfold.compile, or take the shard as it is: "
            "x.as_subclass(torch.Tensor)"
        )
    return (
        f"{name} of numbers of which this rank holds a shard, or a stage's: it would see no more; "
        "whole tensors are in model.full_state_dict(); clip with model.clip_grad_norm_, train with "
        "an optimizer that works number by number (AdamW, SGD), or take the shard as it is: "
        "x.as_subclass(torch.Tensor)"
    )


def _as_shards(result: Any) -> Any:
    if isinstance(result, Tensor):
        return shard(result)
    if isinstance(result, tuple | list):
        kind = list if isinstance(result, list) else tuple
        return kind(_as_shards(x) for x in result) if type(result) in (tuple, list) else result
    return result


def _on_shards(hook: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    return lambda gradient: hook(shard(gradient))


def shard(x: Tensor) -> LocalShard:
    """The tensor as a LocalShard, in the same memory."""
    return x if isinstance(x, LocalShard) else x.as_subclass(LocalShard)


def local_parameter(x: Tensor, requires_grad: bool) -> nn.Parameter:
    """A parameter that is a LocalShard, in the memory of x."""
    let_optimizers_fuse(LocalShard)
    return nn.Parameter(shard(x), requires_grad=requires_grad)


def local_tensor(x: Tensor) -> Tensor:
    """The plain tensor of a LocalShard, in the same memory."""
    return plain_tensor(x)


def mark_gradient(parameter: Tensor) -> None:
    """Makes `.grad` a LocalShard: a hook of the accumulation of gradients."""
    gradient = parameter.grad
    if gradient is not None and not isinstance(gradient, LocalShard):
        parameter.grad = shard(gradient)


def guard_gradients(parameter: Tensor) -> None:
    """From here on gradients that a backward gives the parameter are LocalShards."""
    if parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(mark_gradient)  # type: ignore[no-untyped-call]
