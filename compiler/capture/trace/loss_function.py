"""Calling a model, with the loss function that its outputs and the rest of the batch go to.

    loss_fn(model(**its arguments), **what loss_fn names, *what is left)

The arguments of a batch go to the model if its forward names them, to loss_fn if that does, to both
if both do. What neither names is given to loss_fn by position, in the order of the batch, as in
criterion(model(x), y).
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from meshfold.errors import OptionError

LossFunction = Callable[..., Any]

OUTPUTS = "outputs"
"""What the paths of a model's own tensors begin with where there is a loss function."""


class LossAndOutputs(NamedTuple):
    """A loss, and what the model returned: where the loss is not a tensor of that itself."""

    loss: Any
    outputs: Any


@dataclass(frozen=True)
class Parameters:
    """The parameters of a call. names: in order, of those that can be passed by name; defaults: of
    those that have one; needed: of those without; takes_any: whether other names are taken."""

    names: tuple[str, ...]
    defaults: Mapping[str, Any]
    takes_any: bool

    @property
    def needed(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name not in self.defaults)


def parameters_of(called: Callable[..., Any]) -> Parameters:
    """What a function or the forward of a module takes; anything, if nobody can tell."""
    try:
        signature = inspect.signature(called.forward if isinstance(called, nn.Module) else called)
    except (TypeError, ValueError):  # some of the interpreter's own have no signature
        return Parameters((), {}, True)
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found = {name: p for name, p in signature.parameters.items() if p.kind in named}
    kinds = {p.kind for p in signature.parameters.values()}
    return Parameters(
        tuple(found),
        {n: p.default for n, p in found.items() if p.default is not inspect.Parameter.empty},
        inspect.Parameter.VAR_KEYWORD in kinds,
    )


@dataclass(frozen=True)
class _Split:
    """Names of a batch by where they go."""

    model: tuple[str, ...]
    loss: tuple[str, ...]
    positional: tuple[str, ...]


def _split(model: nn.Module, loss_fn: LossFunction, names: Iterable[str]) -> _Split:
    takes, loss_takes = parameters_of(model), parameters_of(loss_fn)
    wanted = set(loss_takes.names[1:])
    own = [n for n in names if n in takes.names or (takes.takes_any and n not in wanted)]
    return _Split(
        tuple(own),
        tuple(n for n in names if n in wanted),
        tuple(n for n in names if n not in own and n not in wanted),
    )


def call_model(
    model: nn.Module, arguments: Mapping[str, Any], loss_fn: LossFunction | None = None
) -> Any:
    """What the model returns; with a loss function, its result beside that."""
    if loss_fn is None:
        return model(**arguments)
    split = _split(model, loss_fn, arguments)
    outputs = model(**{name: arguments[name] for name in split.model})
    rest = (arguments[name] for name in split.positional)
    loss = loss_fn(outputs, *rest, **{name: arguments[name] for name in split.loss})
    return LossAndOutputs(loss, outputs)


def check_arguments(
    model: nn.Module, arguments: Mapping[str, Any], loss_fn: LossFunction | None = None
) -> None:
    """Raises OptionError for arguments that the model and the loss function do not take, or that
    are missing."""
    takes = parameters_of(model)
    name = type(model).__name__
    own: Iterable[str] = arguments
    if loss_fn is not None:
        split = _split(model, loss_fn, arguments)
        own = split.model
        _check_loss_function(loss_fn, split)
    unknown = [n for n in own if n not in takes.names and not takes.takes_any]
    if unknown:
        raise OptionError(
            f"{name} takes no argument {unknown[0]!r}; it takes {', '.join(takes.names)}"
        )
    missing = [n for n in takes.needed if n not in arguments]
    if missing:
        raise OptionError(
            f"{name} needs {', '.join(missing)}, which the example inputs do not have; they have "
            f"{', '.join(arguments) or 'nothing'}"
        )


def _check_loss_function(loss_fn: LossFunction, split: _Split) -> None:
    if isinstance(loss_fn, nn.Module) and next(loss_fn.parameters(), None) is not None:
        raise OptionError(
            f"loss_fn {type(loss_fn).__name__} has parameters, which would not be trained; make it "
            "part of the model, which then returns its loss"
        )
    called: Any = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    try:
        inspect.signature(called).bind(None, *split.positional, **dict.fromkeys(split.loss))
    except ValueError:
        return
    except TypeError as error:
        what = getattr(called, "__qualname__", type(loss_fn).__name__)
        given = ", ".join(("the outputs", *split.positional, *split.loss))
        raise OptionError(
            f"loss_fn {what} cannot be called with {given}: {error}; what of the batch the model "
            "does not name goes to it"
        ) from error
