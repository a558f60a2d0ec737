"""Where a mask of rows is true, as nonzero() says it, by which rows are taken.

index = (labels >= 0).nonzero()                                as DeBERTa does for its classes
if index.size(0) > 0: logits.gather(0, index.expand(index.size(0), num_labels))
(index,) = mask.nonzero(as_tuple=True); logits[index]
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshfold.capture.masked_rows.functions import name_of
from meshfold.capture.masked_rows.stand_in import Count, Selected
from meshfold.errors import CaptureError

_STAY = frozenset(("expand", "expand_as", "view", "reshape", "flatten", "squeeze", "unsqueeze"))
"""Forms of the same places."""


class Places(Selected):
    """mask.nonzero() of a mask [n], in any form. assume: keeps a check, which every step runs."""

    def __init__(
        self, mask: Tensor, assume: Callable[[Tensor, str], None], refused: CaptureError
    ) -> None:
        super().__init__(refused)
        self.mask, self.version, self.assume = mask, mask._version, assume

    def chosen(self) -> Tensor:
        """The mask. Raises CaptureError where it was changed in place since."""
        if self.mask._version != self.version:
            raise self.refused
        return self.mask

    def _is_any(self) -> None:
        self.assume(self.chosen().any(), "a mask has a row")

    def size(self, dim: int) -> Count:
        if dim != 0:
            raise self.refused
        return Count(self.refused, self._is_any)

    @property
    def shape(self) -> tuple[Count]:
        return (Count(self.refused, self._is_any),)

    def numel(self) -> Count:
        return Count(self.refused, self._is_any)

    def __getattr__(self, name: str) -> Any:
        if name not in _STAY:
            raise self.refused if hasattr(Tensor, name) else AttributeError(name)
        return lambda *args, **kwargs: self


def places_of(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    assume: Callable[[Tensor, str], None],
    refused: Callable[[Any], CaptureError],
) -> Any:
    """What stands for the places of a mask that a function gives; NotImplemented for another."""
    name = name_of(func)
    if name not in ("nonzero", "where") or len(args) != 1 or not isinstance(args[0], Tensor):
        return NotImplemented
    if args[0].dtype != torch.bool or args[0].ndim != 1:
        return NotImplemented
    places = Places(args[0], assume, refused(func))
    return (places,) if name == "where" or kwargs.get("as_tuple") else places


def taken_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Places | None:
    """The places by which a function takes rows of args[0], None for another function."""
    name = name_of(func)
    if kwargs or not args or not isinstance(args[0], Tensor):
        return None
    dim, places = (args[1], args[2]) if len(args) == 3 else (0, args[-1])
    by_dim = name in ("gather", "index_select") and len(args) == 3
    if not isinstance(places, Places) or not (by_dim or (name == "getitem" and len(args) == 2)):
        return None
    if dim != 0 or places.mask.shape != args[0].shape[:1]:
        raise places.refused
    return places
