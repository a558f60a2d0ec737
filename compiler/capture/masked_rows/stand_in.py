"""What stands for a tensor whose shape depends on values, while a model is traced."""

from collections.abc import Sequence
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
    __lt__ = __le__ = __gt__ = __ge__ = __neg__ = _refuse

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        given = (*args, *(kwargs or {}).values())
        lists = [a for a in given if isinstance(a, (tuple, list))]
        found = [a for a in (*given, *chain(*lists)) if isinstance(a, Selected)]
        raise found[0].refused if found else TypeError(f"{func} of what a mask selects")
