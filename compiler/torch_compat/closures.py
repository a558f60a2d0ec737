"""Functions that a copy of a model keeps, made to read the copy: deepcopy leaves them as they are.

self.to_logits = lambda x: x @ self.embedding.weight.t()
layer.register_forward_hook(lambda module, args, output: self.features.append(output))
"""

import types
from collections.abc import Mapping, MutableMapping
from typing import Any

from torch import nn


def rebind_closures(model: nn.Module, memo: Mapping[int, Any]) -> None:
    """Replace functions kept by the modules of a copy, hooks among them, whose closure or defaults
    have objects that were copied, by functions of the copies. memo: deepcopy's, copies by id."""
    rebound: dict[int, Any] = {}
    for module in model.modules():
        _rebind_values(vars(module), memo, rebound, depth=2)


def _rebind_values(
    container: MutableMapping[Any, Any],
    memo: Mapping[int, Any],
    rebound: dict[int, Any],
    depth: int,
) -> None:
    for key, value in list(container.items()):
        if isinstance(value, types.FunctionType):
            container[key] = _rebound(value, memo, rebound)
        elif isinstance(value, dict) and depth:
            _rebind_values(value, memo, rebound, depth - 1)
        elif isinstance(value, list) and depth:
            value[:] = [
                _rebound(v, memo, rebound) if isinstance(v, types.FunctionType) else v
                for v in value
            ]


def _rebound(function: Any, memo: Mapping[int, Any], rebound: dict[int, Any]) -> Any:
    """The function of the copies; the function itself where nothing of it was copied."""
    if id(function) in rebound:
        return rebound[id(function)][1]
    rebound[id(function)] = function, function  # one that calls itself stays as it is

    def copied(value: Any) -> Any:
        if isinstance(value, types.FunctionType):
            return _rebound(value, memo, rebound)
        return memo.get(id(value), value)

    cells = tuple(_contents(cell) for cell in function.__closure__ or ())
    made = tuple(tuple(map(copied, contents)) for contents in cells)
    defaults = tuple(map(copied, function.__defaults__ or ()))
    named = {name: copied(value) for name, value in (function.__kwdefaults__ or {}).items()}
    before = (
        *sum(cells, ()),
        *(function.__defaults__ or ()),
        *(function.__kwdefaults__ or {}).values(),
    )
    after = (*sum(made, ()), *defaults, *named.values())
    if all(old is new for old, new in zip(before, after, strict=True)):
        return function
    closure = tuple(types.CellType(*contents) for contents in made)
    new = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, defaults, closure
    )
    new.__kwdefaults__ = named or None
    new.__dict__.update(function.__dict__)
    new.__qualname__, new.__module__ = function.__qualname__, function.__module__
    rebound[id(function)] = function, new
    return new


def _contents(cell: types.CellType) -> tuple[Any, ...]:
    """What a cell has; nothing where its name is not assigned yet."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()
