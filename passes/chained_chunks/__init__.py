"""Chained chunks, the search: which values of a chunked region can cross its boundaries in chunks,
and the order of tasks in a chain of equal regions. meshfold.codegen.chained_chunks says what this
is, what it gains and how to leave it out."""

from meshfold.passes.chained_chunks.boundary_values import (
    ChunkedValue,
    joined_outputs,
    split_slots,
)
from meshfold.passes.chained_chunks.software_pipeline import (
    NEXT,
    ChainBoundary,
    ChainedOrders,
    chained_order,
)

__all__ = [
    "NEXT",
    "ChainBoundary",
    "ChainedOrders",
    "ChunkedValue",
    "chained_order",
    "joined_outputs",
    "split_slots",
]
