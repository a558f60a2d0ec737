"""LayerDrop: a layer that a Python branch on a draw skips, captured as a choice between two values.

    if self.training and torch.rand([]) < p:      skip = torch.rand([]) < p
        continue                            ->    x = torch.where(skip, x, layer(x))
    x = layer(x)

A graph holds no branch. While the model is traced, a comparison of one number of torch.rand with a
constant answers that the layer runs, and the result of the module that is called next is replaced
by the choice. So a layer is computed in any case; skipped, its parameters get gradients of zeros.

That the branch does nothing but skip the layer is proven by a second trace in which every such
comparison answers the other way: with the choices made, the first program must be the second
(meshfold.capture.pipeline). A comparison with a probability of 0 or 1 is no branch.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as torch_module

_BELOW = ("lt", "__lt__", "le", "__le__")
_ABOVE = ("gt", "__gt__", "ge", "__ge__")


class LayerDrops:
    """What one trace finds. skips: whether a branch skips its layer, not runs it."""

    def __init__(self, skips: bool = False) -> None:
        self.skips = skips
        self.num_chosen = 0
        """Layers whose result is a choice."""
        self.source = ""
        """The line of the first branch."""
        self._draws: dict[int, Tensor] = {}
        self._conditions: dict[int, tuple[Tensor, bool]] = {}
        """Comparisons of draws, and whether they skip where they hold."""
        self._certain: dict[int, tuple[Tensor, bool]] = {}
        """Comparisons with a probability of 0 or 1, and what they say. A draw that is 0 itself is
        left out of account."""
        self._decided: set[int] = set()
        self._pending: int | None = None
        self._depth = 0
        self._given: Tensor | None = None

    @property
    def num_branches(self) -> int:
        return len(self._decided)

    def see(self, func: Any, args: Sequence[Any], result: Any) -> None:
        """A call of torch by the model."""
        name = getattr(func, "__name__", "")
        if func is torch.rand and result.numel() == 1:
            self._draws[id(result)] = result
        elif len(args) == 2 and id(args[0]) in self._draws and isinstance(args[1], int | float):
            if name not in (*_BELOW, *_ABOVE):
                return
            if 0 < args[1] < 1:
                self._conditions[id(result)] = result, name in _BELOW
            else:
                self._certain[id(result)] = result, (name in _ABOVE) == (args[1] <= 0)

    def answer(self, condition: Tensor, source: str) -> bool | None:
        """What a branch on `condition` is told; None if it is no comparison of a draw."""
        key = id(condition)
        if key in self._certain:
            return self._certain[key][1]
        if key not in self._conditions:
            return None
        if key not in self._decided:
            self._decided.add(key)
            self._pending = None if self.skips else key
            self.source = self.source or source
        _, skips_if_true = self._conditions[key]
        return skips_if_true == self.skips

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context in which the result of the module that is called after a branch becomes a
        choice."""
        before = torch_module.register_module_forward_pre_hook(self._enter)
        after = torch_module.register_module_forward_hook(self._leave, with_kwargs=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _enter(self, module: Any, args: tuple[Any, ...]) -> None:
        if self._depth or self._pending is not None:
            self._depth += 1

    def _leave(
        self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> Any:
        if not self._depth:
            return None
        self._depth -= 1
        if self._depth:
            return None
        assert self._pending is not None
        condition, skips_if_true = self._conditions[self._pending]
        self._pending = None
        given = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
        made = result[0] if isinstance(result, tuple) and result else result
        if not isinstance(made, Tensor) or given is None:
            return None
        if (given.shape, given.dtype) != (made.shape, made.dtype):
            return None
        self.num_chosen += 1
        first, second = (given, made) if skips_if_true else (made, given)
        chosen = torch.where(condition.reshape(()), first, second)
        return (chosen, *result[1:]) if isinstance(result, tuple) else chosen
