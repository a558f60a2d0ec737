"""Where a mask of rows is true, as nonzero() says it, by which rows are taken.

index = (labels >= 0).nonzero()                                as DeBERTa does for its classes
if index.size(0) > 0: logits.gather(0, index.expand(index.size(0), num_labels))
(index,) = mask.nonzero(as_tuple=True); logits[index]
rows, places = torch.where(mask); logits[rows, places]         of a mask [n, s], as SASRec does
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
    """mask.nonzero() of a mask [n], in any form, or its indices along one dim of a mask of several.
    assume: keeps a check, which every step runs."""

    def __init__(
        self,
        mask: Tensor,
        dim: int,
        assume: Callable[[Tensor, str], None],
        refused: CaptureError,
    ) -> None:
        super().__init__(refused)
        self.mask, self.version, self.along, self.assume = mask, mask._version, dim, assume

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
    mask, is_tuple = args[0], name == "where" or kwargs.get("as_tuple")
    if mask.dtype != torch.bool or not (mask.ndim == 1 or mask.ndim and is_tuple):
        return NotImplemented
    places = tuple(Places(mask, dim, assume, refused(func)) for dim in range(mask.ndim))
    return places if is_tuple else places[0]


def joined(index: Any) -> Any:
    """The first of the indices [rows, places] that are all that a mask of several dims has; other
    indices as they are."""
    if not isinstance(index, tuple) or not index or not isinstance(index[0], Places):
        return index
    first = index[0]
    of_mask = [p.along for p in index if isinstance(p, Places) and p.mask is first.mask]
    if len(index) != first.mask.ndim or of_mask != [*range(first.mask.ndim)]:
        raise first.refused
    return first


def taken_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Places | None:
    """The places by which a function takes rows of args[0], None for another function."""
    name = name_of(func)
    if kwargs or not args or not isinstance(args[0], Tensor):
        return None
    dim, places = (args[1], args[2]) if len(args) == 3 else (0, joined(args[-1]))
    by_dim = name in ("gather", "index_select") and len(args) == 3
    if not isinstance(places, Places) or not (by_dim or (name == "getitem" and len(args) == 2)):
        return None
    num_dims = places.mask.ndim if isinstance(args[-1], tuple) else 1
    if dim != 0 or places.mask.shape != args[0].shape[:num_dims]:
        raise places.refused
    return places
