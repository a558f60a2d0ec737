"""Programs of one plan for batches of other sizes than the captured one, as the last of an epoch.

    sizes of a batch --capture the model's skeleton--> graph --held against the plan--> program

The skeleton is a copy of the model without storage. It is traced again, in a second or so and once
for each size, since Python may do other things with another size; what it does is held against the
plan's types by the rule table, so a size that the plan cannot divide is refused before it runs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from torch import nn

from meshfold.capture.pipeline import Captured, capture
from meshfold.capture.trace.loss_function import LossFunction
from meshfold.codegen.emit.pipeline import EmittedPipeline, emit_plan
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.distributed.rank_mesh import RankMesh
from meshfold.errors import MeshfoldError, OptionError
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.plan import Plan, model_inputs
from meshfold.ir.strategy import Chunking
from meshfold.passes.fold.assemble import fingerprint
from meshfold.runtime.batches import BatchReader, Shapes, with_shapes
from meshfold.torch_compat.skeletons import meta_copy


@dataclass(frozen=True)
class ProgramForm:
    """What runs batches of one size: plan, program, and what reads a batch."""

    plan: Plan
    captured: Captured
    program: EmittedProgram | EmittedPipeline
    reader: BatchReader
    is_training: bool = True
    """The mode that the model was captured in."""


def form_of(
    plan: Plan,
    captured: Captured,
    program: EmittedProgram | EmittedPipeline,
    mesh: RankMesh,
    fixed: Mapping[str, Any],
    *,
    is_training: bool,
) -> ProgramForm:
    parts = program.stages if isinstance(program, EmittedPipeline) else (program,)
    reader = BatchReader(parts, mesh, {**fixed, **captured.fixed}, casts=plan.precision != "model")
    return ProgramForm(plan, captured, program, reader, is_training)


class OtherSizes:
    """The forms for other sizes than that of `first`, made when they first come. skeleton: of the
    model, in its mode; loss_fn: what it was compiled with."""

    def __init__(
        self,
        model: nn.Module,
        first: ProgramForm,
        mesh: RankMesh,
        fixed: Mapping[str, Any],
        loss_fn: LossFunction | None = None,
    ) -> None:
        self.skeleton = meta_copy(model, first.captured.fixed_buffers)
        self.first = first
        self.loss_fn = loss_fn
        self._mesh = mesh
        self._fixed = fixed
        self._forms: dict[tuple[tuple[str, tuple[int, ...]], ...], ProgramForm] = {}

    def form(self, batch: Mapping[str, Any], shapes: Shapes) -> ProgramForm:
        """For global batches of these shapes. Raises OptionError for sizes that the plan cannot
        divide, or with which the model does something else."""
        key = tuple(sorted(shapes.items()))
        if key not in self._forms:
            try:
                self._forms[key] = self._new_form(batch, shapes)
            except MeshfoldError as error:
                sizes = ", ".join(f"{name} {list(shape)}" for name, shape in key)
                raise OptionError(
                    f"a batch of {sizes} does not run under a plan for {self._planned_sizes()}: "
                    f"{error}; drop it (drop_last=True), fill it up, or plan for it"
                ) from error
        return self._forms[key]

    def _planned_sizes(self) -> str:
        return ", ".join(f"{n} {list(shape)}" for n, shape, _ in self.first.plan.model.inputs)

    def _new_form(self, batch: Mapping[str, Any], shapes: Shapes) -> ProgramForm:
        first = self.first
        inputs = with_shapes(batch, shapes)
        captured = capture(
            self.skeleton,
            inputs,
            precision=first.plan.precision,
            returns=first.captured.graph.returns,
            loss_fn=self.loss_fn,
            rules=first.captured.rules,
            fixed_inputs=tuple(first.captured.fixed),
        )
        plan = _for_size(first.plan, captured)
        _check_same_ops(first.captured.graph, captured.graph)
        program = emit_plan(captured.graph, plan)
        unknown = set(program.axis_sets()) - set(first.program.axis_sets())
        if unknown:
            raise OptionError(f"it communicates over {unknown}, for which there is no group")
        return form_of(
            plan, captured, program, self._mesh, self._fixed, is_training=first.is_training
        )


def _for_size(plan: Plan, captured: Captured) -> Plan:
    """The plan as if made for another batch. Raises OptionError where ranks and microbatches do not
    divide it."""
    graph = captured.graph
    inputs = model_inputs(graph)
    name, shape = next((n, s) for n, s, _ in plan.model.inputs if s[:1] == (plan.model.batch_size,))
    batch_size = next(s[0] for n, s, _ in inputs if n == name)
    parts = plan.strategy.degrees.batch_ranks * plan.strategy.microbatches
    if batch_size == 0 or batch_size % parts:
        raise OptionError(
            f"{batch_size} samples do not divide over the {parts} parts of {plan.strategy.label}"
        )
    info = replace(plan.model, fingerprint=fingerprint(graph), inputs=inputs, batch_size=batch_size)
    # What was chosen for the one size may not divide the other.
    regions = tuple(
        replace(region, chunking=Chunking(), collective_matmul=()) for region in plan.regions
    )
    return replace(plan, model=info, regions=regions)


def _check_same_ops(planned: FoldedGraph, found: FoldedGraph) -> None:
    """Raises OptionError unless layers do the same ops with other sizes."""
    both = zip_longest(_ops(planned), _ops(found), fillvalue="nothing")
    different = next(((a, b) for a, b in both if a != b), None)
    if different is not None:
        raise OptionError(f"with this size the model does {different[1]} for {different[0]}")


def _ops(folded: FoldedGraph) -> Iterator[str]:
    """What every layer does, in order."""
    for instance in folded.instances:
        for op in folded.regions[instance.region].graph.ops:
            yield op.target
        yield "the end of a layer"
