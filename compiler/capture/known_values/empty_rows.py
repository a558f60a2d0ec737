"""Samples that are padding: rows of zeros alone, which a model takes out.

    real = (images == 0.0).sum(dim=(-1, -2, -3)) != images[0].numel()
    images = images[real]                                                as Idefics and SmolVLM do

How many there are decides shapes, so the program is for batches without one: the mask is true
everywhere, and every step checks that it is.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_SUMS = (torch.sum, Tensor.sum)


class EmptyRows:
    """What counts zeros in one trace of a model."""

    def __init__(self) -> None:
        self._are_zero: Any = WeakIdKeyDictionary()
        """x by x == 0."""
        self._counts: Any = WeakIdKeyDictionary()
        """x by the sums of that over all dims but the first."""

    def mask(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """What a call gives if that is the mask of rows that are not all zeros, else None."""
        if getattr(func, "__name__", "") not in ("ne", "__ne__") or len(args) != 2:
            return None
        counts, size = args
        if not isinstance(counts, Tensor) or not isinstance(size, int):
            return None
        x: Tensor | None = self._counts.get(counts)
        if x is None or size != x[0].numel():
            return None
        # A count of integers would be one number per rank where other dims are sharded.
        return (x != 0).flatten(1).any(dim=1)

    def see(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Note what counts zeros."""
        if not args or not isinstance(args[0], Tensor):
            return
        x = args[0]
        name = getattr(func, "__name__", "")
        if name in ("eq", "__eq__") and len(args) == 2 and isinstance(args[1], int | float):
            if args[1] == 0 and x.dim() > 1 and isinstance(result, Tensor):
                self._are_zero[result] = x
        elif func in _SUMS and x in self._are_zero and isinstance(result, Tensor):
            if result.dim() == 1 and len(result) == len(x):
                self._counts[result] = self._are_zero[x]
