"""Numbers, text and tables that forward read of a model when it was captured, and that may be
others by now.

A program holds them as constants. So a weight of a loss that is annealed (`model.beta = 0.1`), a
dropout probability that is raised or an entry of a configuration that is set after
meshfold.compile would have no effect, without a word. Attributes that forward may read (see
meshfold.training.calls.read_names) are compared before a step; the model itself is not kept alive.
"""

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from meshfold.capture.dedup.arguments import is_plain
from meshfold.capture.dedup.contents import content_of, has_attributes
from meshfold.errors import OptionError
from meshfold.training.calls.read_names import ReadNames

_OWN = frozenset(vars(nn.Module()))
_GONE = object()
_DEPTH = 3
"""Of objects in each other."""
WHAT_NEXT = (
    "compile the model again, or make it an argument of forward and pass it in the batch as a "
    "tensor"
)


@dataclass(frozen=True, slots=True)
class _Setting:
    """Attribute `name` of `owner`, which was `value` and held `content`; value: of plain data."""

    owner: Callable[[], Any]
    name: str
    label: str
    value: Any
    content: Hashable

    def change(self) -> str:
        owner = self.owner()
        if owner is None:
            return ""
        now = vars(owner).get(self.name, _GONE)
        if now is self.value or content_of(now) == self.content:
            return ""
        if now is _GONE:
            return f"{self.label} was there when the model was captured"
        if self.value is _GONE or not is_plain(now):
            return f"{self.label} is not what it was when the model was captured"
        return f"{self.label} is {now!r} and was {self.value!r} when the model was captured"


def _itself(owner: Any) -> Any:
    return owner


class CapturedSettings:
    """The settings of `model`. names: those of the model itself."""

    def __init__(self, model: nn.Module) -> None:
        reads = ReadNames.of(model)
        self._settings: list[_Setting] = []
        self._seen: set[tuple[int, str]] = set()
        for path, module in model.named_modules():
            for name, value in vars(module).items():
                if name not in _OWN and reads.may_read(module, name):
                    self._watch(module, name, f"{path}.{name}" if path else name, value, reads)
        self.names = {s.name for s in self._settings if s.owner() is model}

    def _watch(
        self, owner: Any, name: str, label: str, value: Any, reads: ReadNames, depth: int = _DEPTH
    ) -> None:
        if (id(owner), name) in self._seen or callable(value):  # modules, too
            return
        self._seen.add((id(owner), name))
        if depth and not is_plain(value) and has_attributes(value):  # as a configuration
            for inner, held in vars(value).items():
                if reads.may_read(value, inner):
                    self._watch(value, inner, f"{label}.{inner}", held, reads, depth - 1)
            return
        try:
            reference: Callable[[], Any] = weakref.ref(owner)
        except TypeError:  # of a SimpleNamespace, say, which is all that is kept alive then
            reference = partial(_itself, owner)
        kept = value if is_plain(value) else _GONE
        self._settings.append(_Setting(reference, name, label, kept, content_of(value)))

    def change(self) -> str:
        """What is another now, in one line; "" if nothing is."""
        found = next((text for s in self._settings if (text := s.change())), "")
        return found and f"{found}; {WHAT_NEXT}"

    def refuse_set(self, name: str) -> None:
        """Raises OptionError for a setting of the model itself."""
        if name in self.names:
            raise OptionError(f"{name} is a constant of the compiled program; {WHAT_NEXT}")

    def check(self) -> None:
        """Raises OptionError where something is another now."""
        if change := self.change():
            raise OptionError(change)
