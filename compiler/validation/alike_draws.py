"""A model in one process that draws what every draw of its exact program draws.

The exact program (meshfold.passes.graph.without_dropout) has draws that are alike in every step and
op. Under `alike_draws` the random ops of an eager model take their numbers from there too, so that
the two can be compared although they draw: drop path keeps the same samples, noise is the same.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshfold.ops.draws import alike_draw
from meshfold.torch_compat.flex_attention import dense_flex_attention
from meshfold.validation.function_bodies import SeeingMode


class _AlikeDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        namespace, _, name = func.name().partition(".")[0].partition("::")
        numbers = _NUMBERS.get(name.removesuffix("_")) if namespace == "aten" else None
        if numbers is None:
            return func(*args, **kwargs)
        arguments = func._schema.arguments
        # Torch leaves out what is given as it is by default.
        defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
        names = [argument.name for argument in arguments]
        given = defaults | dict(zip(names, args, strict=False)) | kwargs
        if name.endswith("_"):
            filled = given["self"]
            return filled.copy_(numbers(given, filled))
        # The op itself says shape, dtype and device of what it makes.
        made = func(*args, **kwargs)
        return numbers(given, made).to(made.dtype)


@contextmanager
def alike_draws() -> Iterator[None]:
    """A context in which random ops of torch, but for dropout's own, draw alike."""
    with _AlikeDraws():  # type: ignore[no-untyped-call]
        yield


def _wide(like: Tensor) -> torch.dtype:
    return like.dtype if like.is_floating_point() else torch.float64


def _uniform(given: Mapping[str, Any], like: Tensor) -> Tensor:
    low, high = given.get("from", 0.0), given.get("to", 1.0)  # rand has neither
    u = alike_draw("uniform", like.shape, _wide(like), like.device)
    result: Tensor = u * (high - low) + low
    return result


def _normal(given: Mapping[str, Any], like: Tensor) -> Tensor:
    n = alike_draw("normal", like.shape, _wide(like), like.device)
    result: Tensor = n * given.get("std", 1.0) + given.get("mean", 0.0)
    return result


def _bernoulli(given: Mapping[str, Any], like: Tensor) -> Tensor:
    u = alike_draw("uniform", like.shape, _wide(like), like.device)
    result: Tensor = u < given.get("p", given["self"])
    return result


def _exponential(given: Mapping[str, Any], like: Tensor) -> Tensor:
    u = alike_draw("uniform", like.shape, _wide(like), like.device)
    least = torch.finfo(like.dtype).eps / 2
    result: Tensor = (-(1.0 - u).log()).clamp_min(least) / given["lambd"]
    return result


def _whole(given: Mapping[str, Any], like: Tensor) -> Tensor:
    low, high = given.get("low", 0), given["high"]
    u = alike_draw("uniform", like.shape, torch.float64, like.device)
    result: Tensor = (u * (high - low)).floor() + low
    return result


def _chosen(given: Mapping[str, Any], like: Tensor) -> Tensor:
    p, count = given["self"], given["num_samples"]
    if given["replacement"] and count > 1:
        return like
    ratio = p / _exponential({"lambd": 1.0}, p)
    places: Tensor = ratio.topk(count, -1).indices if count > 1 else ratio.argmax(-1, True)
    return places


_NUMBERS: dict[str, Callable[[Mapping[str, Any], Tensor], Tensor]] = {
    "rand": _uniform,
    "rand_like": _uniform,
    "uniform": _uniform,
    "randn": _normal,
    "randn_like": _normal,
    "normal": _normal,
    "bernoulli": _bernoulli,
    "exponential": _exponential,
    "multinomial": _chosen,
    "randint": _whole,
    "randint_like": _whole,
}


class _NoDropout(SeeingMode):
    # Position and name of the probability.
    _FUNCTIONS = {
        F.dropout: (1, "p"),
        torch.dropout: (1, "p"),
        F.scaled_dot_product_attention: (4, "dropout_p"),
        **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), (5, "dropout")),
    }

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in self._FUNCTIONS:
            position, name = self._FUNCTIONS[func]
            args = [0.0 if k == position else a for k, a in enumerate(args)]
            if len(args) <= position:
                kwargs[name] = 0.0
        return self.run(func, args, kwargs)


@contextmanager
def without_dropout() -> Iterator[None]:
    """A context in which no dropout of torch drops, and other random ops (drop path, dropout of
    channels, noise) draw as the exact program does; train mode stays train mode otherwise.
    flex_attention is dense: torch's own has no backward on a CPU."""
    with _NoDropout(), alike_draws(), dense_flex_attention():
        yield
