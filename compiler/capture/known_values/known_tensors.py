"""Values of the tensors of a trace, where they follow from constants and fixed inputs alone.

    grid.tolist(), bool(mask.any()), range(h)   answered with the numbers
    mask.nonzero(), positions[mask], unique()   constants of the program: shapes are known, too
    x[mask], x.repeat_interleave(counts)        x at the indices that the known mask or counts mean
    x.reshape(h, w), x.split(sizes)             of known numbers: the numbers

Beside every function that the model calls on known tensors alone, the same is computed on their
values, on the CPU. What draws random numbers is not known, nor what is written in place where
something unknown comes in.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

from meshfold.torch_compat.autograd_functions import outside_of_tracing

_MOST_ELEMENTS = 1 << 18
"""Of a tensor whose values are kept."""


def _both(*names: str) -> frozenset[Any]:
    """Functions of torch and methods of tensors of these names, as far as there are both."""
    places = (torch, Tensor, F)
    return frozenset(getattr(p, name) for name in names for p in places if hasattr(p, name))


_MAKERS = frozenset((torch.arange, torch.linspace, torch.ones, torch.zeros, torch.full, torch.eye))
_LIKE = _both("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
"""Functions that read the shape and dtype of a tensor only."""
_COPIES = frozenset((torch.tensor, torch.as_tensor))
"""Functions that make a tensor of numbers alone."""

_ASKS = _both(
    *("__bool__", "__int__", "__float__", "__index__", "__contains__", "__format__", "item"),
    *("tolist", "numpy", "is_nonzero", "equal", "allclose"),
)
"""Functions whose result is no tensor."""

_OF_SHAPES = _both(
    *("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"),
    *("repeat_interleave", "where", "__getitem__"),
)
"""Functions that may make a shape of values."""

_SIZED = _both(
    *("arange", "zeros", "ones", "full", "empty", "linspace", "view", "reshape", "expand"),
    *("repeat", "split", "split_with_sizes", "narrow", "roll", "pad", "interpolate", "tile"),
    *("broadcast_to", "new_zeros", "new_ones", "new_full", "new_empty", "unflatten"),
    *("tensor", "as_tensor", "tensor_split", "chunk", "randn", "rand", "select"),
)
"""Functions that take sizes and places, as numbers."""

_GET, _SET = Tensor.__getitem__, Tensor.__setitem__
_REPEATS = _both("repeat_interleave")
_DRAWS_NOTHING_OF = _both("empty", "empty_like", "new_empty", "empty_strided")


class KnownTensors:
    """What is known in one trace of a model."""

    def __init__(self) -> None:
        self._values: Any = WeakIdKeyDictionary()  # by the tensors of the trace

    def value(self, x: Tensor) -> Tensor | None:
        """The values of x, None where they are not known."""
        # What is no fake is a constant of the program.
        if type(x) is Tensor and not x.is_meta:
            return x
        found: Tensor | None = self._values.get(x)
        return found

    def answer(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a function gives of known tensors where it is a number or decides a shape;
        NotImplemented for anything else."""
        if func not in _ASKS and func not in _OF_SHAPES:
            return NotImplemented
        if func in _OF_SHAPES and not _shape_depends(func, args, kwargs):
            return NotImplemented
        tensors = list(_tensors((args, kwargs)))
        if not tensors or any(self.value(x) is None for x in tensors):
            return NotImplemented
        found = self._computed(func, args, kwargs)
        return NotImplemented if found is None else found

    def arguments(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """The call with numbers in place of known tensors where sizes stand, and indices in place
        of known masks and counts."""
        if func in (_GET, _SET):
            x, index, *rest = args
            return func, (x, self._index(index), *rest), dict(kwargs)
        if func in _REPEATS and (call := self._repeats(args, kwargs)) is not None:
            return call
        if func not in _SIZED:
            return func, tuple(args), dict(kwargs)
        is_of_tensor = bool(args) and isinstance(args[0], Tensor) and func not in _MAKERS
        first = args[:1] if is_of_tensor else ()
        rest = _mapped(self._number, tuple(args[len(first) :]))
        return func, (*first, *rest), _mapped(self._number, dict(kwargs))

    def see(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Note the values of what a function returned."""
        if func in _LIKE and args and args[0].numel() <= _MOST_ELEMENTS:
            blank = {"dtype": args[0].dtype}
            args = (on_values(torch.empty, (tuple(args[0].shape),), blank), *args[1:])
        tensors = list(_tensors((args, kwargs)))
        values = [self.value(x) for x in tensors]
        if _writes(func, kwargs):
            self._write(func, args, kwargs, values)
            return
        results = list(_tensors(result))
        if type(func).__module__ == "torch._ops":  # may be the user's
            return
        if not results or (func not in (*_MAKERS, *_COPIES) if not tensors else None in values):
            return
        if func in _DRAWS_NOTHING_OF or sum(x.numel() for x in results) > _MOST_ELEMENTS:
            return
        found = self._computed(func, args, kwargs)
        for x, value in zip(results, _tensors(found), strict=False):
            if x.shape == value.shape and x.dtype == value.dtype:
                self._values[x] = value

    def _write(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], values: Sequence[Any]
    ) -> None:
        target = kwargs["out"] if "out" in kwargs else args[0]
        written = [self.value(x) for x in _tensors(target)]
        if all(value is not None for value in values) and "out" not in kwargs:
            if self._computed(func, args, kwargs, gives_nothing=True) is not None:
                return
        storages = {v.untyped_storage().data_ptr() for v in written if v is not None}
        for x, value in list(self._values.items()):
            if value.untyped_storage().data_ptr() in storages:
                del self._values[x]

    def _computed(self, func: Any, args: Any, kwargs: Any, *, gives_nothing: bool = False) -> Any:
        """What `func` gives of the values; None where it draws, or cannot be computed. With
        gives_nothing True once it has run."""

        def valued(x: Any) -> Any:
            return self.value(x) if isinstance(x, Tensor) else x

        found = on_values(func, _mapped(valued, tuple(args)), _mapped(valued, dict(kwargs)))
        return True if gives_nothing and found is not NotImplemented else _or_none(found)

    def _number(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dim() or x.is_floating_point():
            return x
        value = self.value(x)
        return x if value is None else on_values(Tensor.item, (value,), {})

    def _index(self, index: Any) -> Any:
        """An index without known masks and known numbers."""
        if not isinstance(index, tuple):
            found = self._places(index)
            return found[0] if len(found) == 1 else found
        return tuple(place for part in index for place in self._places(part))

    def _places(self, part: Any) -> tuple[Any, ...]:
        if isinstance(part, Tensor) and part.dtype == torch.bool and part.dim():
            value = self.value(part)
            if value is not None and value.dim() == 1 and on_values(_is_full, (value,), {}):
                return (slice(None),)
            if value is not None:
                return tuple(on_values(_places_of, (value,), {}))
        return (_mapped(self._number, part),)

    def _repeats(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
        """x.repeat_interleave(counts, dim) as a selection; None unless counts are a known tensor of
        several and x is not."""
        given = dict(zip(("input", "repeats", "dim"), args, strict=False)) | dict(kwargs)
        x, counts, dim = given["input"], given.get("repeats"), given.get("dim")
        value = self.value(counts) if isinstance(counts, Tensor) else None
        if value is None or dim is None or self.value(x) is not None:
            return None
        rows = on_values(_rows_of, (value, x.shape[dim]), {})
        return torch.index_select, (x, dim, rows), {}


def on_values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What `func` returns for real tensors, which no trace sees; NotImplemented where it raises or
    draws random numbers, which are left undrawn."""
    with outside_of_tracing(), torch.no_grad():
        before = torch.get_rng_state()
        try:
            found = func(*args, **kwargs)
        except Exception:
            return NotImplemented
        finally:
            has_drawn = not torch.equal(torch.get_rng_state(), before)
            torch.set_rng_state(before)
        return NotImplemented if has_drawn else found


def _is_full(mask: Tensor) -> bool:
    return bool(mask.all())


def _places_of(mask: Tensor) -> tuple[Tensor, ...]:
    return tuple(mask.nonzero().unbind(-1))


def _rows_of(counts: Tensor, size: int) -> Tensor:
    return torch.arange(size).repeat_interleave(counts)


def _or_none(found: Any) -> Any:
    return None if found is NotImplemented else found


def _writes(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function changes its first argument, or one that it is given for its result."""
    name = getattr(func, "__name__", "")
    is_method = name.endswith("_") and not name.endswith("__")
    is_operator = name.startswith("__i") and name not in ("__index__", "__int__", "__invert__")
    in_place = kwargs.get("inplace") is True or kwargs.get("out") is not None
    return is_method or is_operator or in_place or func is _SET or name == "__set__"


def _shape_depends(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the shape of a call's result depends on values."""
    if func is _GET:
        parts = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(p, Tensor) and p.dtype == torch.bool for p in parts)
    if func in _both("where"):
        return len(args) + len(kwargs) == 1
    if func in _REPEATS:
        return any(isinstance(x, Tensor) for x in (*args[1:], kwargs.get("repeats"))) or (
            len(args) + len(kwargs) == 1
        )
    return True


def _tensors(tree: Any) -> Iterator[Tensor]:
    """The tensors of nested arguments, bounds of slices, too."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for child in tree:
            yield from _tensors(child)
    elif isinstance(tree, Mapping):
        yield from _tensors(tuple(tree.values()))
    elif isinstance(tree, slice):
        yield from _tensors((tree.start, tree.stop, tree.step))


def _mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same arguments around `function(leaf)`."""
    if isinstance(tree, (tuple, list)) and type(tree) in (tuple, list):
        return type(tree)(_mapped(function, child) for child in tree)
    if type(tree) is dict:
        return {name: _mapped(function, child) for name, child in tree.items()}
    if isinstance(tree, slice):
        return slice(*(_mapped(function, x) for x in (tree.start, tree.stop, tree.step)))
    return function(tree)
