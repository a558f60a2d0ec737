"""Which program runs a call: that of the plan, or one for other arguments, sizes or another mode.

    the plan's arguments and sizes         the plan's program
    the same arguments in other sizes      that of meshfold.training.calls.batch_sizes
    other arguments, under no_grad         a forward program: what the model returns for them, whole
    eval mode of a model that draws or     a forward program of the model in eval mode, under
    updates buffers in train mode          no_grad

A forward program is captured from the skeleton of the model when the call first comes, and typed on
the parameters as the plan stores them (meshfold.passes.planner.forward_types).
"""

from collections.abc import Mapping
from typing import Any

import torch

from meshfold.capture.dedup.contents import content_of
from meshfold.capture.pipeline import Captured, capture
from meshfold.codegen.emit.check_program import check_program
from meshfold.codegen.emit.pipeline import EmittedPipeline
from meshfold.codegen.emit.region import emit_typed
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.errors import OptionError
from meshfold.ir.mesh import SHARD_AXIS
from meshfold.ir.op_graph import SourceKind
from meshfold.ir.returns import ALL, Returns
from meshfold.ir.spmd import INVARIANT
from meshfold.ir.strategy import TpMode
from meshfold.passes.planner.forward_types import StoredParameter, forward_types
from meshfold.runtime.batches import constants_of, with_shapes
from meshfold.torch_compat.pytree import named_leaves
from meshfold.training.calls.batch_sizes import OtherSizes, ProgramForm, form_of
from meshfold.training.calls.call_arguments import CallArguments
from meshfold.training.calls.captured_mode import CapturedMode


def gathered_over(program: EmittedProgram) -> set[tuple[int, ...]]:
    """The sets of axes over which parameters are gathered together."""
    return {group.gather for region in program.regions for group in region.groups}


def stored_parameters(program: EmittedProgram) -> dict[str, StoredParameter]:
    """How a program stores its parameters, by name, and how without the axes that it gathers."""
    mesh = program.mesh
    gathered: dict[str, set[str]] = {}
    for k in range(len(program.programs)):
        sources = program.folded.instances[k].sources
        for group in program.region_of(k).groups:
            for member in group.members:
                gathered.setdefault(sources[member.slot].name, set()).update(
                    mesh.storage.names[k] for k in group.gather
                )
    return {
        name: StoredParameter(
            layout,
            tuple(
                INVARIANT
                if (SHARD_AXIS if axis.replicas > 1 else axis.name) in gathered.get(name, ())
                else t
                for axis, t in zip(mesh.axes, layout, strict=True)
            ),
        )
        for name, layout in program.stored.items()
    }


def _read_buffers(program: EmittedProgram | EmittedPipeline) -> set[str]:
    sources = (s for instance in program.folded.instances for s in instance.sources)
    return {s.name for s in sources if s.kind is SourceKind.BUFFER}


def _plain(value: Any) -> Any:
    """What a fixed input or another argument holds, in full."""
    return repr(value.tolist()) if isinstance(value, torch.Tensor) else content_of(value)


def _paths(inputs: Mapping[str, Any]) -> set[str]:
    return {path for path, _ in named_leaves(dict(inputs))}


class Calls:
    """The programs of a model, made when they first come. arguments: of the captured call."""

    def __init__(self, sizes: OtherSizes, modes: CapturedMode, arguments: CallArguments) -> None:
        self._sizes = sizes
        self._first = sizes.first
        self._modes = modes
        self._arguments = arguments
        self._forms: dict[object, ProgramForm] = {}

    def form(self, batch: Mapping[str, Any], call: str, training: bool) -> ProgramForm:
        """For a batch of arguments by name. Raises OptionError where there is none."""
        reader = self._first.reader
        is_other = not reader.has_arguments(batch)
        if not is_other and not self._modes.needs_capture(training):
            shapes = reader.other_shapes(batch)
            return self._first if shapes is None else self._sizes.form(batch, shapes)
        forward_only = call == "forward" and not torch.is_grad_enabled()
        if not forward_only:
            if is_other:
                reader.refuse_arguments(batch)
            self._modes.check_program(training)
        if isinstance(self._first.program, EmittedPipeline):
            raise OptionError(
                f"{self._first.plan.strategy.label}: there is no forward alone under stages or "
                "microbatches; load a checkpoint under a plan without them for evaluation"
            )
        return self._forward_form(batch, training, has_loss=not is_other)

    def _forward_form(
        self, batch: Mapping[str, Any], training: bool, has_loss: bool
    ) -> ProgramForm:
        shapes = self._first.reader.global_shapes(batch)
        inputs = with_shapes(self._with_constants(batch), shapes)
        rest = frozenset((k, _plain(v)) for k, v in named_leaves(inputs) if k not in shapes)
        key = training, has_loss, tuple(sorted(shapes.items())), rest
        if key not in self._forms:
            self._forms[key] = self._new_form(inputs, training, has_loss)
        return self._forms[key]

    def _with_constants(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        missing = self._arguments.missing(batch)
        if missing:
            raise OptionError(
                f"{self._arguments.name} needs {', '.join(missing)}; pass "
                f"{'them' if len(missing) > 1 else 'it'}, or what it was compiled with"
            )
        return {**self._arguments.constants, **batch}

    def _new_form(self, inputs: dict[str, Any], training: bool, has_loss: bool) -> ProgramForm:
        first, model = self._first, self._sizes.skeleton
        graph = first.captured.graph
        returns = (
            graph.returns
            if has_loss
            else Returns(outputs=ALL, sharded=graph.returns.sharded, has_loss=False)
        )
        modes = {module: module.training for module in model.modules()}
        if training != first.is_training:
            model.train(training)
        try:
            captured = capture(
                model,
                inputs,
                precision=first.plan.precision,
                returns=returns,
                loss_fn=self._sizes.loss_fn if has_loss else None,
                fixed_inputs=[n for n in first.captured.fixed if n in _paths(inputs)],
            )
        finally:
            for module, mode in modes.items():
                module.training = mode
        program = self._program(captured)
        return form_of(
            first.plan,
            captured,
            program,
            first.reader.mesh,
            constants_of(inputs),
            is_training=training,
        )

    def _program(self, captured: Captured) -> EmittedProgram:
        """The forward program on the plan's stored parameters."""
        first, plan = self._first.program, self._first.plan
        assert isinstance(first, EmittedProgram), "pipelines are refused"
        mode: TpMode = "sequence" if plan.strategy.sequence_parallel else "tensor"
        split, typings = forward_types(
            captured.graph, plan.cluster, plan.mesh, stored_parameters(first), mode
        )
        program = emit_typed(split, typings, CostModel(plan.cluster, plan.mesh))
        check_program(program, "emit")
        self._check_buffers(program)
        unknown = gathered_over(program) - gathered_over(first)
        if unknown:
            raise OptionError(f"it gathers parameters over {unknown}, for which there is no group")
        return program

    def _check_buffers(self, program: EmittedProgram) -> None:
        held = _read_buffers(self._first.program)
        held |= {b.name for b in program.folded.buffers if b.persistent}
        unknown = sorted(_read_buffers(program) - held)
        if unknown:
            raise OptionError(
                f"with these arguments the model reads buffer {unknown[0]}, which no training step "
                "does, and which no state_dict has; register it with persistent=True"
            )
