"""Calling a model, with the loss function that its outputs and the rest of the batch go to.

    loss_fn(model(**its arguments), **what loss_fn names, *what is left)

The arguments of a batch go to the model if its forward names them, to loss_fn if that does, to both
if both do. What neither names is given to loss_fn by position, in the order of the batch, as in
criterion(model(x), y).
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from meshfold.errors import OptionError
from meshfold.torch_compat.process_groups import as_one_process

LossFunction = Callable[..., Any]

OUTPUTS = "outputs"
"""What the paths of a model's own tensors begin with where there is a loss function."""


class LossAndOutputs(NamedTuple):
    """A loss, and what the model returned: where the loss is not a tensor of that itself."""

    loss: Any
    outputs: Any


@dataclass(frozen=True)
class Parameters:
    """The parameters of a call. names: in order, without *args; defaults: of those that have one;
    needed: of those without; takes_any: whether other names are taken; unnamed: of those that are
    only passed by position; before_rest: those in front of *args; rest: the name of *args, if there
    is one. What goes there is called args_0, args_1 and so on."""

    names: tuple[str, ...]
    defaults: Mapping[str, Any]
    takes_any: bool
    unnamed: tuple[str, ...] = ()
    before_rest: tuple[str, ...] = ()
    rest: str | None = None

    @property
    def needed(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name not in self.defaults)

    def takes(self, name: str) -> bool:
        return name in self.names or self.takes_any or self._is_rest(name)

    def rest_names(self, count: int) -> tuple[str, ...]:
        """What so many arguments that go to *args are called."""
        return tuple(f"{self.rest}_{k}" for k in range(count))

    def rest_of(self, names: Iterable[str]) -> tuple[str, ...]:
        """Names of what goes to *args, in its order."""
        return tuple(sorted(filter(self._is_rest, names), key=lambda n: int(n.split("_")[-1])))

    def bound(self, given: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Arguments by position, and by name."""
        rest = self.rest_of(given)
        first = self.before_rest if rest else self.unnamed
        values = {**self.defaults, **given}
        by_position = [values[name] for name in (*first, *rest) if name in values]
        return by_position, {n: v for n, v in given.items() if n not in first and n not in rest}

    def _is_rest(self, name: str) -> bool:
        if self.rest is None or name in self.names:
            return False
        return re.fullmatch(rf"{re.escape(self.rest)}_\d+", name) is not None


def parameters_of(called: Callable[..., Any]) -> Parameters:
    """What a function or the forward of a module takes; anything, if nobody can tell."""
    try:
        signature = inspect.signature(called.forward if isinstance(called, nn.Module) else called)
    except (TypeError, ValueError):  # some of the interpreter's own have no signature
        return Parameters((), {}, True)

    def of(*kinds: Any) -> tuple[str, ...]:
        return tuple(name for name, p in signature.parameters.items() if p.kind in kinds)

    kind = inspect.Parameter
    unnamed, rest = of(kind.POSITIONAL_ONLY), of(kind.VAR_POSITIONAL)
    before_rest = of(kind.POSITIONAL_ONLY, kind.POSITIONAL_OR_KEYWORD)
    names = (*before_rest, *of(kind.KEYWORD_ONLY))
    defaults = {name: signature.parameters[name].default for name in names}
    return Parameters(
        names,
        {name: value for name, value in defaults.items() if value is not kind.empty},
        bool(of(kind.VAR_KEYWORD)),
        unnamed,
        before_rest,
        rest[0] if rest else None,
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
    own = [n for n in names if n in takes.names or (takes.takes(n) and n not in wanted)]
    return _Split(
        tuple(own),
        tuple(n for n in names if n in wanted),
        tuple(n for n in names if n not in own and n not in wanted),
    )


@as_one_process()
def call_model(
    model: nn.Module, arguments: Mapping[str, Any], loss_fn: LossFunction | None = None
) -> Any:
    """What the model returns; with a loss function, its result beside that. The batch is the global
    one: a model that asks whether there are other processes is told that there are none."""
    if loss_fn is None:
        return _called(model, arguments)
    split = _split(model, loss_fn, arguments)
    outputs = _called(model, {name: arguments[name] for name in split.model})
    rest = (arguments[name] for name in split.positional)
    loss = loss_fn(outputs, *rest, **{name: arguments[name] for name in split.loss})
    return LossAndOutputs(loss, outputs)


def _called(model: nn.Module, given: Mapping[str, Any]) -> Any:
    by_position, by_name = parameters_of(model).bound(given)
    return model(*by_position, **by_name)


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
    unknown = [n for n in own if not takes.takes(n)]
    if unknown:
        raise OptionError(
            f"{name} takes no argument {unknown[0]!r}; it takes {', '.join(takes.names)}"
        )
    rest = takes.rest_names(len(takes.rest_of(arguments)))
    missing = [n for n in (*takes.needed, *rest) if n not in arguments]
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
