"""Numbers with limits, as types of fields: what a file that holds another number is refused for."""

from typing import Annotated, NamedTuple

MOST_NUMBER = 2**63 - 1
"""Of a count or of bytes."""
MOST_SECONDS = 1e15
MOST_FLOPS = 1e36
"""Of a step, and of a second."""
MOST_SIZE = 2**31 - 1
"""Of a batch, a sequence, a degree."""
MOST_DEVICES = 131_072
"""Of a cluster, and of a mesh."""
MOST_INSTANCES = 1_000_000
"""Of a run of equal things: what a short file may expand to."""


class Limits(NamedTuple):
    """The least number that a field takes, and the greatest; None for any."""

    least: float
    most: float | None = None


Count = Annotated[int, Limits(0, MOST_NUMBER)]
Positive = Annotated[int, Limits(1, MOST_NUMBER)]
Instances = Annotated[int, Limits(1, MOST_INSTANCES)]
Bytes = Annotated[int, Limits(0, MOST_NUMBER)]
Seconds = Annotated[float, Limits(0, MOST_SECONDS)]
Flops = Annotated[float, Limits(0, MOST_FLOPS)]
