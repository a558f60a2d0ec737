"""Numbers with limits, as types of fields: what a file that holds another number is refused for."""

from typing import Annotated, NamedTuple


class Limits(NamedTuple):
    """The least number that a field takes, and the greatest; None for any."""

    least: float
    most: float | None = None


Count = Annotated[int, Limits(0)]
Positive = Annotated[int, Limits(1)]
Bytes = Annotated[int, Limits(0)]
Seconds = Annotated[float, Limits(0)]
