"""The arguments of a call of a compiled model: as the model itself takes them, by name.

    model(x, y)   model(x, target=y)   model(x=x, target=y, mask=None)    one and the same

What goes to *args of forward is called args_0, args_1 and so on. Arguments that neither the model
nor its loss function names come behind those of forward, in the order of the example inputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from meshfold.capture.dedup.contents import content_of
from meshfold.capture.trace.loss_function import Parameters, parameters_of
from meshfold.errors import OptionError
from meshfold.torch_compat.pytree import named_leaves


@dataclass(frozen=True)
class CallArguments:
    """name: of the model's class; takes: what its forward takes; behind: names of what else there
    was in the example inputs, for a loss function; constants: example inputs without tensors."""

    name: str
    takes: Parameters
    behind: tuple[str, ...]
    constants: Mapping[str, Any]

    @staticmethod
    def of(model: nn.Module, example_inputs: Mapping[str, Any]) -> "CallArguments":
        """Those of a model that was captured with `example_inputs`."""
        takes = parameters_of(model)
        constants = {k: v for k, v in example_inputs.items() if not _has_tensor(v)}
        behind = tuple(name for name in example_inputs if name not in takes.names)
        return CallArguments(type(model).__name__, takes, behind, constants)

    def named(self, positional: Sequence[Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """All arguments by name, without those that are what they are by default.

        Raises OptionError for names that the model does not take, for what is given twice, and for
        too many arguments.
        """
        order = self._order(len(positional))
        if len(positional) > len(order):
            raise OptionError(
                f"{self.name} takes {len(order)} arguments ({', '.join(order)}), "
                f"{len(positional)} are given"
            )
        found = dict(zip(order, positional, strict=False))
        twice = [name for name in given if name in found]
        if twice:
            raise OptionError(f"{self.name}: argument {twice[0]!r} is given twice")
        unknown = [name for name in given if name not in order and not self.takes.takes(name)]
        if unknown:
            raise OptionError(
                f"{self.name} takes no argument {unknown[0]!r}; it takes {', '.join(order)}"
            )
        return {n: v for n, v in {**found, **given}.items() if not self._is_default(n, v)}

    def _order(self, num_positional: int) -> tuple[str, ...]:
        """Names of arguments by position."""
        if self.takes.rest is None:
            return (*self.takes.names, *self.behind)
        num_rest = max(0, num_positional - len(self.takes.before_rest))
        return (*self.takes.before_rest, *self.takes.rest_names(num_rest))

    def _is_default(self, name: str, value: Any) -> bool:
        if name in self.constants or name not in self.takes.defaults or _has_tensor(value):
            return False
        default = self.takes.defaults[name]
        return value is default or content_of(value) == content_of(default)

    def missing(self, given: Mapping[str, Any]) -> list[str]:
        """Arguments without a default that are not there."""
        return [n for n in self.takes.needed if n not in given and n not in self.constants]


def named_inputs(model: nn.Module, example_inputs: Any) -> Mapping[str, Any]:
    """Example inputs by name; a tuple of them is in the order of the model's arguments. Raises
    OptionError."""
    if not isinstance(model, nn.Module):
        raise OptionError(f"the model is {kind_text(model)}; pass an nn.Module, made and ready")
    positional, named = in_order(example_inputs)
    return CallArguments.of(model, {}).named(positional, {}) if positional else named


def kind_text(value: object) -> str:
    """What a wrong argument is, in a message."""
    return f"the class {value.__name__}" if isinstance(value, type) else repr(value)[:80]


def in_order(batch: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Arguments by position and by name of a batch: a mapping, a sequence, or the only argument."""
    if isinstance(batch, Mapping):
        return (), batch
    return (batch if isinstance(batch, tuple | list) else (batch,)), {}


def _has_tensor(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for _, leaf in named_leaves(value))
