"""Choices of a plan that need the emitted, simulated program, in the order in which they are made.

    micro_chunks       in how many micro-chunks regions run      meshfold.refine.micro_chunks
    collective_matmul  which products are collective matmuls     meshfold.refine.collective_matmul
    buckets            sizes of buckets, and of the pieces of    meshfold.passes.events.bucketing
                       hierarchical all-reduces

Each takes the plan of the one before, and keeps what makes the simulated step faster and fits.
"""

from collections.abc import Callable
from dataclasses import dataclass

from meshfold.codegen.emit.memo import EmissionMemo
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import Plan
from meshfold.passes.events.bucketing import BucketSizes, with_buckets
from meshfold.refine.collective_matmul import with_collective_matmul
from meshfold.refine.micro_chunks import with_micro_chunks


@dataclass(frozen=True)
class Refinement:
    """run: (plan, captured model, options, memo of its emissions) -> plan. Raises OptionError where
    a pin cannot be kept."""

    name: str
    run: Callable[[Plan, FoldedGraph, CompileOptions, EmissionMemo | None], Plan]


def _micro_chunks(
    plan: Plan, folded: FoldedGraph, options: CompileOptions, memo: EmissionMemo | None
) -> Plan:
    return with_micro_chunks(plan, folded, options.micro_chunks_pin, memo)


REFINEMENTS = (
    Refinement("micro_chunks", _micro_chunks),
    Refinement("collective_matmul", with_collective_matmul),
)


def refined(
    plan: Plan, folded: FoldedGraph, options: CompileOptions, memo: EmissionMemo | None = None
) -> Plan:
    """`plan` with every choice made, and with the events and the simulated step of its program.
    memo: as for emit, of the same plan in another mode.

    Raises OptionError where a pin cannot be kept.
    """
    return bucketed(reordered(plan, folded, options, memo), options)


def reordered(
    plan: Plan, folded: FoldedGraph, options: CompileOptions, memo: EmissionMemo | None
) -> Plan:
    """The same without sizes of buckets."""
    for refinement in REFINEMENTS:
        plan = refinement.run(plan, folded, options, memo)
    return plan


def bucketed(plan: Plan, options: CompileOptions, like: Plan | None = None) -> Plan:
    """The plan of `reordered` with its sizes of buckets: the fastest, or where no pin says others
    those of the plan `like`, which take one simulation."""
    reductions, gathers = options.reduce_bucket_pin, options.allgather_bucket_pin
    pieces = options.hierarchical_all_reduce_pin
    if like is not None:
        reductions = like.reduce_bucket_bytes if reductions is None else reductions
        gathers = like.allgather_bucket_bytes if gathers is None else gathers
        own = like.hierarchical_all_reduce_bytes if like.mesh == plan.mesh else 0
        pieces = own if pieces is None else pieces
    return with_buckets(plan, BucketSizes(reductions, gathers, pieces))
