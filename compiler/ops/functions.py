"""Ops that the user's code defines, as emitted graphs call them.

An autograd.Function is an op by the name "package.module:Qualified.Name", which needs no table: who
has the model has the Function at hand (CustomOp.function), and who has the name alone imports it.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Function

from meshfold.errors import UnsupportedOpError
from meshfold.torch_compat.pytree import flat


class FunctionOp:
    """An autograd.Function as an op: called with its positional arguments, it returns its tensors.

    Its tensors come contiguous, as they mostly do in one process: kernels count on that, and shards
    and what collectives return are often views. __name__ is what programs print.
    fake: the results without their numbers, for what cannot run on tensors without storage.
    """

    def __init__(
        self, function: type[Function], name: str, fake: Callable[..., Any] | None = None
    ) -> None:
        self.function = function
        self.fake = fake
        self.__name__ = name

    def __call__(self, *args: Any) -> tuple[torch.Tensor, ...]:
        given = map(_contiguous, map(_unpacked, args))
        return _tensors(self.function.apply(*given))  # type: ignore[no-untyped-call]

    def without_storage(self, *args: Any) -> Any:
        """What the Function returns on tensors without storage, containers and all."""
        given = map(_unpacked, args)
        if self.fake is not None:
            return _Stated.apply(self.fake, *given)  # type: ignore[no-untyped-call]
        return self.function.apply(*given)  # type: ignore[no-untyped-call]

    def tensors_without_storage(self, *args: Any) -> tuple[torch.Tensor, ...]:
        """The tensors of that."""
        return _tensors(self.without_storage(*args))


class _Stated(Function):
    """What a user says that a Function returns, with a gradient where autograd gives it one."""

    @staticmethod
    def forward(ctx: Any, fake: Callable[..., Any], *args: Any) -> Any:
        ctx.save_for_backward(*(a for a in args if isinstance(a, torch.Tensor)))
        return fake(*args)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError("only what it returns is known")


def imported_function(name: str) -> FunctionOp:
    """The Function of a name. Raises UnsupportedOpError if there is none to import."""
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise UnsupportedOpError(
            f"no autograd.Function {name} can be imported; capture the model that calls it", op=name
        ) from error
    if not (isinstance(found, type) and issubclass(found, Function)):
        raise UnsupportedOpError(f"{name} is no autograd.Function; name one", op=name)
    return FunctionOp(found, name)


def _tensors(returned: Any) -> tuple[torch.Tensor, ...]:
    leaves, _ = flat(returned)
    return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


_MAPPING = "<dict>"
"""First of the tuple that stands for a dict in the arguments of an op."""


def packed(arg: Any) -> Any:
    """An argument of a Function as a graph holds it: dicts as tuples of their items."""
    if isinstance(arg, (tuple, list)):
        return tuple(map(packed, arg))
    if type(arg) is dict:
        return (_MAPPING, *((key, packed(value)) for key, value in arg.items()))
    return arg


def _unpacked(arg: Any) -> Any:
    """Sequences as tuples: a graph does not tell them from lists."""
    if not isinstance(arg, (tuple, list)):
        return arg
    if arg and isinstance(arg[0], str) and arg[0] == _MAPPING:
        return {key: _unpacked(value) for key, value in arg[1:]}
    return tuple(map(_unpacked, arg))


def _contiguous(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        return arg.contiguous()
    return tuple(map(_contiguous, arg)) if isinstance(arg, tuple) else arg
