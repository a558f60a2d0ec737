"""What stands for a tensor whose shape depends on values, while a model is traced."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from meshfold.errors import CaptureError


class Selected:
    """What has a shape that depends on values. What a subclass does not know raises `refused`."""

    def __init__(self, refused: CaptureError) -> None:
        self.refused = refused

    def _refuse(self, *_: Any) -> Any:
        raise self.refused

    __getattr__ = __len__ = __getitem__ = __iter__ = __bool__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __floordiv__ = __mod__ = __abs__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __neg__ = _refuse

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        given = (*args, *(kwargs or {}).values())
        lists = [a for a in given if isinstance(a, (tuple, list))]
        found = [a for a in (*given, *chain(*lists)) if isinstance(a, Selected)]
        raise found[0].refused if found else TypeError(f"{func} of what a mask selects")


class Count(Selected):
    """How many rows there are. Asked whether there are any, there are: assume keeps a check of
    that, which every step runs. number: makes the number of them, which assertions compare with
    others (models of transformers count the places of images)."""

    def __init__(
        self,
        refused: CaptureError,
        assume: Callable[[], None],
        number: Callable[[], Any] | None = None,
    ) -> None:
        super().__init__(refused)
        self.assume, self.number = assume, number

    def _is_any(self, other: Any, least: int) -> bool:
        if type(other) is not int or other != least:
            raise self.refused
        self.assume()
        return True

    def __gt__(self, other: Any) -> bool:
        return self._is_any(other, 0)

    def __ge__(self, other: Any) -> bool:
        return self._is_any(other, 1)

    def __ne__(self, other: object) -> bool:
        if self.number is not None and type(other) is int and other > 0:
            return bool(self.number() != other)
        return self._is_any(other, 0)

    def __eq__(self, other: object) -> bool:
        if self.number is not None and type(other) is int and other > 0:
            return bool(self.number() == other)
        return not self._is_any(other, 0)

    def __bool__(self) -> bool:
        return self._is_any(0, 0)

    __hash__ = object.__hash__
