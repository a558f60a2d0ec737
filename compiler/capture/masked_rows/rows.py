"""x[mask] while a model is traced: all rows of x, and the mask that says which of them count.

    logits[mask], labels[mask]                   rows of a batch, of equal masks
    functional.cross_entropy(logits[mask], labels[mask])
    (prediction[valid] - target[valid]).abs().mean()
    y[mask] = self.mlp(x[mask])                  back to where they were taken

Functions of every row by itself are computed of all rows, and what is reduced over rows leaves out
those that the mask does not have. Values of these are replaced where they are taken: a NaN that
marks what is missing, or log(0), would be a NaN times 0 in a gradient.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from meshfold.capture.masked_rows.functions import (
    ALONG_DIMS,
    CLASS_LOSSES,
    ELEMENTWISE,
    INDEXED,
    LOSSES,
    OF_LAST_DIMS,
    name_of,
)
from meshfold.capture.masked_rows.stand_in import Count, Selected
from meshfold.errors import CaptureError


@dataclass(frozen=True)
class Mask:
    """A mask of rows. version: of its memory when rows were taken; assume: keeps a check, which
    every step runs; is_same: whether another tensor is equal for every batch; number: makes a
    number of a tensor, of which assertions can ask."""

    tensor: Tensor
    version: int
    assume: Callable[[Tensor, str], None]
    is_same: Callable[[Tensor, Tensor], bool]
    number: Callable[[Tensor], Any]


def _operator(name: str) -> Any:
    """An operator as the method of tensors that it is."""

    def call(self: "MaskedRows", *others: Any) -> Any:
        return self._call(getattr(Tensor, name), (self, *others), {})

    return call


class MaskedRows(Selected):
    """x[mask] of values [*lead, *row] and a mask [*lead]: a tensor of shape [count, *row]."""

    def __init__(self, values: Tensor, mask: Mask, refused: CaptureError) -> None:
        super().__init__(refused)
        self.values = values
        self.mask = mask

    @property
    def num_lead(self) -> int:
        return self.mask.tensor.ndim

    @property
    def row(self) -> tuple[int, ...]:
        return tuple(self.values.shape[self.num_lead :])

    @property
    def ndim(self) -> int:
        return 1 + len(self.row)

    @property
    def count(self) -> Count:
        return self._count_times(1)

    def _count_times(self, width: int) -> Count:
        def is_any() -> None:
            self.mask.assume(self.chosen().any(), "a mask has a row")

        number = self.mask.number
        return Count(self.refused, is_any, lambda: number(self.chosen().sum() * width))

    @property
    def shape(self) -> tuple[Any, ...]:
        return self.count, *self.row

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    def __len__(self) -> int:
        raise self.refused

    def __getattr__(self, name: str) -> Any:
        """A method of tensors."""
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(name)
        method = getattr(Tensor, name)
        if not callable(method):
            raise self.refused
        return lambda *args, **kwargs: self._call(method, (self, *args), kwargs)

    __add__, __radd__ = _operator("__add__"), _operator("__radd__")
    __sub__, __rsub__ = _operator("__sub__"), _operator("__rsub__")
    __mul__, __rmul__ = _operator("__mul__"), _operator("__rmul__")
    __truediv__, __rtruediv__ = _operator("__truediv__"), _operator("__rtruediv__")
    __pow__, __matmul__ = _operator("__pow__"), _operator("__matmul__")
    __neg__, __invert__ = _operator("__neg__"), _operator("__invert__")
    __and__, __or__ = _operator("__and__"), _operator("__or__")
    __lt__, __le__, __gt__ = _operator("__lt__"), _operator("__le__"), _operator("__gt__")
    __ge__, __eq__, __ne__ = _operator("__ge__"), _operator("__eq__"), _operator("__ne__")
    __getitem__ = _operator("__getitem__")
    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        rows = [a for a in (*args, *(kwargs or {}).values()) if isinstance(a, MaskedRows)]
        if not rows:  # in a list, as torch.cat takes it
            return Selected.__torch_function__(func, types, args, kwargs)
        return rows[0]._call(func, args, kwargs or {})

    def chosen(self) -> Tensor:
        """The mask. Raises CaptureError where it was changed in place since."""
        if self.mask.tensor._version != self.mask.version:
            raise self.refused
        return self.mask.tensor

    def kept(self, other: float | Tensor) -> Tensor:
        """values, with `other` in rows that do not count."""
        shape = (*self.mask.tensor.shape, *(1,) * len(self.row))
        return torch.where(self.chosen().reshape(shape), self.values, other)

    def like(self, values: Tensor) -> "MaskedRows":
        return MaskedRows(values, self.mask, self.refused)

    def padded(self) -> Tensor:
        """[n, s] of values [n, s]: what is selected of each row, then zeros."""
        if self.values.ndim != 2 or self.row:
            raise self.refused
        mask, length = self.chosen(), self.values.shape[1]
        place = torch.arange(length, device=mask.device)
        order = torch.argsort(torch.where(mask, place, place + length), dim=-1)
        return self.values.masked_fill(~mask, 0).gather(-1, order)

    def _call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a function of torch makes of rows. Raises `refused` for one that is not known."""
        name = name_of(func)
        if name in ("add", "radd") and len(args) == 2 and not kwargs:
            (other,) = (a for a in args if a is not self) if args[0] is not args[1] else (self,)
            if isinstance(other, Tensor) and other.ndim == self.ndim:
                return self._with_rows(other)
        if name in ("size", "numel", "nelement"):
            return self._size(name, *args[1:], **kwargs)
        if name in ("view", "reshape", "flatten"):
            return self._reshaped(name, args[1:])
        if name in CLASS_LOSSES:
            return self._class_loss(func, args, kwargs)
        if name in LOSSES:
            return self._loss(func, args, kwargs)
        if name == "getitem":
            return self.indexed(args[1]) if args[0] is self else self._of_table(*args)
        if name in ("max", "min", "amax", "amin") and len(args) == 1 and not kwargs:
            return self._extreme(name)
        if name in ("sum", "mean") and self._is_over_rows(args, kwargs):
            is_whole = len(args) < 2 and kwargs.get("dim") is None
            return self._reduced(name, None if is_whole else range(self.num_lead))
        return self._of_each(name, func, args, kwargs)

    def _of_each(
        self, name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> "MaskedRows":
        """What is computed of every row by itself."""
        if name in ALONG_DIMS:
            args, kwargs = self._along_dim(name, args, kwargs)
        elif name in ELEMENTWISE:
            self._check_broadcast((*args, *kwargs.values()))
        elif name not in OF_LAST_DIMS or not self._is_first_alone(args, kwargs):
            raise self.refused
        elif name == "matmul" and (len(self.row) != 1 or args[1].ndim != 2):
            raise self.refused
        elif name in ("linear", "layer_norm", "rms_norm") and not self.row:
            raise self.refused
        values = self._indices_of if name in INDEXED else self._values_of
        made = func(
            *map(values, args),
            **{key: values(argument) for key, argument in kwargs.items()},
        )
        if not isinstance(made, Tensor):
            raise self.refused
        return self.like(made)

    def _is_first_alone(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        others = (*args[1:], *kwargs.values())
        return args[0] is self and not any(isinstance(other, MaskedRows) for other in others)

    def _check_broadcast(self, operands: Sequence[Any]) -> None:
        """Other tensors broadcast with a row, not with rows of another number of dims."""
        num_dims = len(self.row)
        for operand in operands:
            if isinstance(operand, MaskedRows) and len(operand.row) != num_dims:
                raise self.refused
            if isinstance(operand, Tensor) and operand.ndim > num_dims:
                raise self.refused

    def _values_of(self, argument: Any) -> Any:
        """The values of rows of the same mask. Raises CaptureError for those of another one."""
        if not isinstance(argument, MaskedRows):
            return argument
        if not self.mask.is_same(self.chosen(), argument.chosen()):
            raise argument.refused
        return argument.values

    def _indices_of(self, argument: Any) -> Any:
        """The same, with 0 for places of rows that do not count."""
        values = self._values_of(argument)
        if isinstance(argument, MaskedRows) and not values.is_floating_point():
            return argument.kept(0)
        return values

    def _dim(self, dim: Any, num_new: int = 0) -> int:
        """A dim of a row as one of values. Raises CaptureError for the dim of all rows. num_new:
        dims that the result has more."""
        if not isinstance(dim, int) or isinstance(dim, bool):
            raise self.refused
        dim = dim + self.ndim + num_new if dim < 0 else dim
        if not 1 <= dim < self.ndim + num_new:
            raise self.refused
        return int(dim) - 1 + self.num_lead

    def _along_dim(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The arguments, with dims as those of values."""
        place, default, num_new = ALONG_DIMS[name]
        dims = args[place] if len(args) > place else kwargs.get("dim", default)
        if isinstance(dims, (tuple, list)):
            found: Any = tuple(map(self._dim, dims))
        else:
            found = self._dim(dims, num_new)
        if len(args) > place:
            return [*args[:place], found, *args[place + 1 :]], kwargs
        return args, {**kwargs, "dim": found}

    def _of_table(self, table: Tensor, index: Any) -> "MaskedRows":
        """table[rows] of rows of one whole number each."""
        if index is not self or self.row or self.dtype not in (torch.int64, torch.int32):
            raise self.refused
        taken: MaskedRows = self.like(table[self.kept(0)])
        return taken

    def indexed(self, index: Any) -> "MaskedRows":
        """rows[:, i], rows[..., i], rows[:, None]."""
        parts = index if isinstance(index, tuple) else (index,)
        plain = all(p is None or p is ... or type(p) in (int, slice) for p in parts)
        if not plain or not parts or (parts[0] is not ... and parts[0] != slice(None)):
            raise self.refused
        if parts[0] is ...:
            if sum(p is not None for p in parts[1:]) > len(self.row):
                raise self.refused
            return self.like(self.values[parts])
        return self.like(self.values[(*(slice(None),) * self.num_lead, *parts[1:])])

    def _reshaped(self, name: str, shape: Sequence[Any]) -> "MaskedRows":
        """rows.view(-1, *row): rows stay, or become rows of one element each."""
        if len(shape) == 1 and isinstance(shape[0], (tuple, list, torch.Size)):
            shape = tuple(shape[0])
        is_whole = len(shape) == 1 and type(shape[0]) is int and shape[0] == -1
        if is_whole or (name == "flatten" and not shape):
            lead = (*self.mask.tensor.shape, *(1,) * len(self.row))
            places = self.chosen().reshape(lead).expand_as(self.values)
            mask = replace(self.mask, tensor=places, version=places._version)
            if self.row and self.mask.tensor.ndim:
                return MaskedRows(self.values, mask, self.refused)
            return self
        row = tuple(shape[1:])
        if isinstance(shape[0], Count):
            size = math.prod(self.row) // max(abs(math.prod(row)), 1)
            row = tuple(size if n == -1 else n for n in row)
        elif type(shape[0]) is not int or shape[0] != -1:
            raise self.refused
        if name == "flatten" or not all(type(size) is int and size > 0 for size in row):
            raise self.refused
        if math.prod(row) != math.prod(self.row):
            raise self.refused
        return self.like(self.values.reshape(*self.mask.tensor.shape, *row))

    def _with_rows(self, rows: Tensor) -> "MaskedRows":
        """Rows of another tensor added to these, in order."""
        shape = (*self.mask.tensor.shape, *(1,) * len(self.row))
        places = self.chosen().reshape(shape).expand_as(self.values)
        return self.like(self.values + torch.zeros_like(self.values).masked_scatter(places, rows))

    def _size(self, name: str, dim: Any = None) -> Any:
        if name != "size":
            return self._count_times(math.prod(self.row))
        if dim is None:
            return self.shape
        return self.count if dim in (0, -self.ndim) else self.values.shape[self._dim(dim)]

    def _is_over_rows(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        given = {**dict(zip(("dim", "keepdim"), args[1:], strict=False)), **kwargs}
        if given.pop("dim", 0) not in (None, 0, (0,), [0], -self.ndim):
            return False
        if any(given.values()):
            raise self.refused
        return True

    def _reduced(self, name: str, dims: Sequence[int] | None) -> Tensor:
        """The sum or mean over rows, of whole rows or, with `dims`, of every element by itself."""
        is_number = not self.values.is_floating_point()
        total = self.kept(0)
        total = total.sum() if dims is None else total.sum(tuple(dims))
        if name == "sum":
            return total
        if is_number:
            raise self.refused
        count = self.chosen().sum() * (math.prod(self.row) if dims is None else 1)
        return total / count.to(total.dtype)

    def _extreme(self, name: str) -> Tensor:
        """The largest or smallest element of all rows."""
        is_largest = name.endswith("max")
        if self.values.is_floating_point():
            beyond = -math.inf if is_largest else math.inf
        elif self.values.dtype == torch.bool:
            raise self.refused
        else:
            limits = torch.iinfo(self.values.dtype)
            beyond = limits.min if is_largest else limits.max
        kept = self.kept(beyond)
        return kept.amax() if is_largest else kept.amin()

    def _loss(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A loss of elements, reduced over the rows that count."""
        given = self._bound(func, args, kwargs)
        reduction = given.get("reduction", "mean")
        self._check_broadcast([a for key, a in given.items() if key != "reduction"])
        values = {key: self._values_of(argument) for key, argument in given.items()}
        losses = self.like(func(**{**values, "reduction": "none"}))
        if reduction == "none":
            return losses
        if reduction == "batchmean":
            return losses._reduced("sum", None) / self.chosen().sum().to(losses.dtype)
        return losses._reduced(reduction, None)

    def _class_loss(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A loss over classes: targets of rows that do not count are left out."""
        given = self._bound(func, args, kwargs)
        logits, target = given["input"], given["target"]
        if not isinstance(logits, MaskedRows) or not isinstance(target, MaskedRows):
            raise self.refused
        if not logits.row or target.values.is_floating_point():
            raise self.refused
        self._values_of(logits), self._values_of(target)
        left_out = given.get("ignore_index", -100)
        lead = self.num_lead
        given["input"] = logits.values.flatten(0, lead - 1)
        given["target"] = target.kept(left_out).flatten(0, lead - 1)
        made = func(**given)
        if given.get("reduction", "mean") != "none":
            return made
        return self.like(made.unflatten(0, self.mask.tensor.shape))

    def _bound(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by name. Raises CaptureError for the reductions of old."""
        given = dict(inspect.signature(func).bind(*args, **kwargs).arguments)
        if given.pop("size_average", None) is not None or given.pop("reduce", None) is not None:
            raise self.refused
        return given


def is_mask_of(mask: Any, values: Tensor) -> bool:
    """Whether values[mask] are rows that a mask selects."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or not mask.ndim:
        return False
    return mask.shape == values.shape[: mask.ndim]


def rows_of(values: Tensor, mask: Mask, number: int, refused: CaptureError) -> MaskedRows:
    """values[mask]. number: of this selection, so that what is put into rows that do not count
    differs from one to the next, and their distance is not 0."""
    rows = MaskedRows(values, mask, refused)
    if not values.is_floating_point():
        return rows.like(rows.kept(0))
    places = torch.arange(math.prod(rows.row), device=values.device, dtype=values.dtype)
    ordinary = 0.5 + 0.2 * torch.sin(1.7 * places + number)
    return rows.like(rows.kept(ordinary.reshape(rows.row)))
