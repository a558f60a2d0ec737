"""CompiledModel: what meshfold.compile returns, an nn.Module that an ordinary training loop drives.

    loss = compiled.train_step(batch)        any plan: forward and backward of the batch
    optimizer.step()

    loss = compiled(**batch)                 a plan that runs the batch in one pass
    loss.backward()

It holds this rank's shards as parameters under the original names; tied names are one parameter.
"""

import gc
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.capture.pipeline import Captured
from meshfold.capture.trace.loss_function import LossFunction
from meshfold.codegen.emit.pipeline import EmittedPipeline, emit_plan
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.distributed.rank_mesh import ProcessMesh, RankMesh
from meshfold.errors import MeshfoldError, OptionError
from meshfold.ir.mesh import DATA_AXIS
from meshfold.ir.plan import Plan
from meshfold.offload.host_parameters import HostParameters
from meshfold.passes.graph.without_dropout import without_dropout
from meshfold.runtime.batches import constants_of
from meshfold.runtime.pipeline_runner import PipelineRunner
from meshfold.runtime.runner import ProgramRunner
from meshfold.torch_compat.tensor_subclasses import on_plain_tensors
from meshfold.training.calls.agreement import NUM_COMPARED, StepAgreement
from meshfold.training.calls.batch_sizes import OtherSizes, ProgramForm, form_of
from meshfold.training.calls.call_arguments import CallArguments, in_order
from meshfold.training.calls.captured_mode import CapturedMode
from meshfold.training.calls.captured_settings import CapturedSettings
from meshfold.training.calls.other_calls import Calls
from meshfold.training.calls.step_results import check_gradient, check_loss, step_result
from meshfold.training.calls.untrained import Untrained
from meshfold.training.calls.weights_left_behind import watch_weights
from meshfold.training.module_tree import BoundTensors, canonical_names, copied, register_shards
from meshfold.training.sharded_model import ShardedModel
from meshfold.training.shards.gradient_norm import clip_gradients, cut_parameters, sharded_axes
from meshfold.training.shards.host_storage import host_parameters, run_step
from meshfold.training.shards.local_shard import guard_gradients, local_parameter, mark_gradient
from meshfold.training.shards.local_state import (
    initial_shards,
    local_tensors,
    stored_tensors,
)
from meshfold.training.shards.state_dict import StateExchange
from meshfold.training.shards.step_hooks import StepHooks
from meshfold.training.use_symmetric_memory import share_memory

_SHARED = (
    "plan program rank_mesh _canonical _bound _modes _settings _arguments _local_tensors _states "
    "_form _calls _agreement _sharded".split()
)
"""Attributes that copies have in common."""


class CompiledModel(ShardedModel):
    """A model under a plan.

    plan, program: what was chosen and what was emitted, for any cluster size. rank_mesh: this rank
    among the processes, or None when there are none; then there are no parameters and forward
    raises. example_inputs: the arguments of the captured call.

    Parameters are local shards, those that the plan offloads in the host's memory. state_dict gives
    DTensors and load_state_dict takes DTensors or full tensors, see
    meshfold.training.shards.state_dict; both are called on all ranks together.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        captured: Captured,
        program: EmittedProgram | EmittedPipeline,
        rank_mesh: RankMesh | None,
        example_inputs: Mapping[str, Any],
        num_compared_batches: int | None = NUM_COMPARED,
        loss_fn: LossFunction | None = None,
    ) -> None:
        super().__init__()
        self.plan = plan
        self.program = program
        self.rank_mesh = rank_mesh
        self.num_forwards = 0
        """Forward passes so far, of evaluation and accumulation too; a train_step is one. Dropout
        draws from (plan seed, num_forwards), which a checkpoint restores."""
        self._is_closed = False
        self.host_side: HostParameters | None = None
        self._hooks: StepHooks | None = None
        self._canonical = canonical_names(program.folded)
        self._modes = CapturedMode(model, captured.graph)
        self._arguments = CallArguments.of(model, example_inputs)
        self._runners: dict[tuple[int, bool], ProgramRunner | PipelineRunner] = {}
        """By the program's id and self.training."""
        self.training = model.training
        if rank_mesh is None:
            return
        self._local_tensors = local_tensors(program, rank_mesh.coords)
        self._states = StateExchange(rank_mesh, stored_tensors(program))
        fixed = constants_of(example_inputs)
        self._form = form_of(plan, captured, program, rank_mesh, fixed, is_training=model.training)
        sizes = OtherSizes(model, self._form, rank_mesh, fixed, loss_fn)
        self._calls = Calls(sizes, self._modes, self._arguments)
        axes = sharded_axes(program)
        self._agreement = (
            StepAgreement.of(rank_mesh, num_compared_batches, axes)
            if isinstance(rank_mesh, ProcessMesh)
            else None
        )
        self._sharded = frozenset(name for name, of in axes.items() if of)
        """Parameters of which another rank holds another shard, or none."""
        self._adopt(model, initial_shards(model, program, self._states, rank_mesh, plan.seed))
        self._bound = BoundTensors.of(self, self._canonical, captured.fixed_buffers)
        self._guard()
        self._untrained = Untrained()
        watch_weights(model, self)
        self._settings = CapturedSettings(model)

    @property
    def data_rank(self) -> int:
        """Which slice of the batch this rank takes: the `rank` of a DistributedSampler."""
        return self._data_coordinate[0]

    @property
    def num_data_ranks(self) -> int:
        """Slices that the batch has: the `num_replicas` of a DistributedSampler."""
        return self._data_coordinate[1]

    @property
    def _data_coordinate(self) -> tuple[int, int]:
        """(data_rank, num_data_ranks). Raises MeshfoldError without processes."""
        self._check_processes()
        assert self.rank_mesh is not None
        mesh = self.rank_mesh.mesh
        if DATA_AXIS not in mesh.names:
            return 0, 1
        axis = mesh.names.index(DATA_AXIS)
        return self.rank_mesh.coords[axis], mesh.sizes[axis]

    def forward(self, *arguments: Any, **batch: Any) -> Any:
        """The model's loss (or its only output) for the global batch or this rank's part of it;
        where outputs were asked for, the model's own structure with the loss and them in it.

        Arguments are those of the model's forward, by position or name. A batch of another size
        than the captured one, as the last of an epoch, gets a program of its own
        (meshfold.training.calls.batch_sizes); all ranks pass the same sizes, parts if they passed
        parts before. So do other arguments (no labels) under torch.no_grad(), which return what the
        model returns for them (meshfold.training.calls.other_calls). Raises OptionError for a batch
        that does not fit the captured inputs or that the plan cannot divide, and for a plan with
        stages or microbatches, whose forward and backward take turns. Raises RankLostError, here or
        in backward, when other ranks do not come to a collective within the timeout of the default
        process group.
        """
        named = self._arguments.named(arguments, batch)
        form = self._form_for(named, "forward")
        runner = self.runner(form)
        if isinstance(runner, PipelineRunner):
            raise OptionError(
                f"{self.plan.strategy.label}: forward and backward of microbatches take turns; "
                "call train_step(batch), or plan with the pin microbatches=1"
            )
        return step_result(form, self._run(form, runner, named), self._states)

    def train_step(self, batch: Any, *, timeout_s: float | None = None) -> Any:
        """Forward and backward of a batch (the global one, or this rank's part) under any plan.
        batch: arguments by name, or a tuple of them in the order of the model's forward.

        Gradients of the whole batch are added to `.grad`, ready for the optimizer. Returns the loss
        (0-dim, detached), the same on all ranks, or what forward returns, detached. timeout_s: how
        long this rank waits for others at each collective; None: as long as the default process
        group does.

        Raises OptionError for a batch that does not fit the captured inputs or a timeout that is
        not above 0, RankLostError when other ranks die, hang or come late. A step that raises
        leaves num_forwards as it was; a pipeline's also `.grad`, which is to be zeroed otherwise.
        """
        if timeout_s is not None and timeout_s <= 0:
            raise OptionError(f"timeout_s {timeout_s:g}: give seconds above 0, or none")
        positional, given = in_order(batch)
        named = self._arguments.named(positional, given)
        form = self._form_for(named, "train_step", timeout_s)
        runner = self.runner(form)
        runs_backward = isinstance(runner, PipelineRunner)
        if not runs_backward:
            check_loss(self.program.folded.outputs[0])
        step = self.num_forwards
        try:
            hooks = self._hooks.around_step() if self._hooks else nullcontext()
            with torch.enable_grad():
                with hooks:
                    outputs = self._run(form, runner, named, timeout_s)
                if not runs_backward:
                    check_gradient(outputs[0])
                    torch.autograd.backward(outputs[0])
                for name, parameter in self.named_parameters():
                    if self._canonical[name] in self._sharded:
                        mark_gradient(parameter)
                return step_result(form, [x.detach() for x in outputs], self._states)
        except BaseException:
            # A retry draws the same dropout masks.
            self.num_forwards = step
            raise

    def _check_processes(self) -> None:
        if self._is_closed:
            raise MeshfoldError("this model was closed; compile it again to run it")
        if self.rank_mesh is None:
            raise MeshfoldError(
                f"this plan runs on {self.plan.world_size} processes and there is no process "
                f"group; start it with torchrun --nproc-per-node {self.plan.world_size} and call "
                "torch.distributed.init_process_group() before meshfold.compile"
            )

    def _next_step(self, timeout_s: float | None) -> int:
        """Count a step; random ops draw from (seed, number)."""
        assert self.rank_mesh is not None
        self.rank_mesh.begin_step(self.num_forwards, timeout_s)
        self.num_forwards += 1
        return self.num_forwards - 1

    def run_with(self, runner: ProgramRunner, batch: Mapping[str, Any]) -> Tensor:
        """As forward, on another runner of this program. Raises OptionError as forward does."""
        return self._run(self._form, runner, batch)[0]

    def _form_for(
        self, batch: Mapping[str, Any], call: str, timeout_s: float | None = None
    ) -> ProgramForm:
        """What runs batches of this size, after the ranks have compared what they run."""
        self._check_processes()
        assert self.rank_mesh is not None
        self.rank_mesh.begin_step(self.num_forwards, timeout_s)
        if self._agreement is not None:
            with on_plain_tensors():
                does = call + self._unlike_compiled()
            self._agreement.check_call(does, batch, self.num_forwards, self.training)
            reader = self._form.reader
            reader.is_smaller = reader.may_be_smaller(batch) and self._agreement.are_alike(batch)
        self._settings.check()
        form = self._calls.form(batch, call, self.training)
        if self._agreement is not None:
            self._agreement.check_contents(batch, self._form.reader.local_inputs)
            with on_plain_tensors():
                parameters = self._bound.by_name(self.named_parameters())
                self._agreement.check_parameters(parameters, self.num_forwards)
        return form

    def _unlike_compiled(self) -> str:
        """What other ranks are to hear of tensors that are not as compiled; "" if all are."""
        if self._bound.change(self):
            return " with other tensors than it was compiled for"
        if self._settings.change():
            return " with other settings of the model than it was captured with"
        return self._modes.thawed_text(self._bound.by_name(self.named_parameters()))

    def _run(
        self,
        form: ProgramForm,
        runner: ProgramRunner | PipelineRunner,
        batch: Mapping[str, Any],
        timeout_s: float | None = None,
    ) -> list[Tensor]:
        with on_plain_tensors():
            inputs = form.reader.read(batch)
            self._bound.check(self)
            parameters = self._bound.by_name(self.named_parameters())
            buffers = self._bound.by_name(self.named_buffers())
            self._modes.check_trained(parameters)
            if torch.is_grad_enabled():
                self._untrained.see(parameters)
            rng = self.plan.seed, self._next_step(timeout_s)
            return run_step(runner, self.host_side, parameters, buffers, inputs, rng=rng)

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises OptionError for a setting of the model, which a program holds as a constant."""
        if "_settings" in vars(self) and name not in vars(self):
            self._settings.refuse_set(name)
        super().__setattr__(name, value)

    def train(self, mode: bool = True) -> "CompiledModel":
        """Switch dropout on or off. Raises OptionError where the captured program cannot follow."""
        if not isinstance(mode, bool):
            raise OptionError(f"mode {mode!r}: neither train nor eval; write True or False")
        self._modes.check(mode)
        for module in self.modules():
            module.training = mode
        return self

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale gradients so that the norm of all of them, of the whole model, is at most
        `max_norm`; returns the norm before, the same on all ranks.

        In place of torch.nn.utils.clip_grad_norm_, which sees this rank's shards alone. Called on
        all ranks together, after backward. Raises OptionError for an order that is not above 0,
        RuntimeError for a norm that is no number, if so asked.
        """
        self._check_processes()
        assert self.rank_mesh is not None
        local = self._bound.by_name(self.named_parameters())
        return clip_gradients(
            self.program, self.rank_mesh, local, max_norm, norm_type, error_if_nonfinite
        )

    def use_symmetric_memory(self) -> None:
        """Experimental: never measured on devices that read each other's memory. See
        meshfold.training.use_symmetric_memory. Called on all ranks, before a step. Raises
        OptionError."""
        share_memory(self.program, self.rank_mesh)

    def close(self) -> None:
        """Give the process groups back, with the threads and buffers that they hold: for programs
        that compile many models. Called on all ranks together; forward raises afterwards."""
        if isinstance(self.rank_mesh, ProcessMesh):
            self.rank_mesh.close()
            del self._states, self._form, self._calls, self._agreement
        self.rank_mesh = self.host_side = None
        self._is_closed = True
        self._runners.clear()
        gc.collect()  # threads of a group end when nobody holds it, not even a cycle of DeviceMesh

    # Building.

    def runner(self, form: ProgramForm | None = None) -> ProgramRunner | PipelineRunner:
        """What runs the program of `form` (default: that of the plan's batch) in the present
        mode."""
        assert self.rank_mesh is not None
        form = form or self._form
        key = id(form.program), self.training
        if key not in self._runners:
            program = form.program
            if form.is_training and not self.training:
                program = emit_plan(without_dropout(program.folded), form.plan)
            constants = form.captured.constants
            self._runners[key] = (
                PipelineRunner(program, self.rank_mesh, constants, self.host_side)
                if isinstance(program, EmittedPipeline)
                else ProgramRunner(program, self.rank_mesh, constants, host_side=self.host_side)
            )
        return self._runners[key]

    def _adopt(self, model: nn.Module, local: Mapping[str, Tensor]) -> None:
        """Register local parts in the module tree of the original, in its order."""
        cut = cut_parameters(self.program)
        parameters = {
            p.name: (local_parameter if p.name in cut else nn.Parameter)(
                local[p.name], p.requires_grad
            )
            for p in self._local_tensors.parameters.values()
        }
        buffers = {n: x for n, x in local.items() if n not in parameters}
        persistent = {b.name: b.persistent for b in self._local_tensors.buffers.values()}
        register_shards(self, model, self._canonical, parameters, buffers, persistent)

    def _guard(self) -> None:
        """What looks after the gradients of the parameters that this object has."""
        assert self.rank_mesh is not None
        stored = self._bound.by_name(self.named_parameters())
        if isinstance(self.program, EmittedPipeline):
            self._hooks = StepHooks(stored, self._sharded)
        else:
            for name in self._sharded & stored.keys():
                guard_gradients(stored[name])
        self.host_side = host_parameters(self.program, self.rank_mesh, stored, self._mark)

    def __deepcopy__(self, memo: dict[int, Any]) -> "CompiledModel":
        """A copy with parameters and buffers of its own, on the same processes, of which `close`
        closes both. All ranks copy, since steps of either are collective. Raises OptionError."""
        if self.host_side is not None and self.host_side.is_read_instead:
            raise OptionError("copy the model before LateUpdates is made of it, not beside updates")
        made = copied(
            self,
            memo,
            _SHARED,
            {"host_side": None, "_hooks": None, "_runners": {}, "_untrained": Untrained()},
        )
        if made.rank_mesh is not None:
            made._guard()
        return made

    def _mark(self, name: str, parameter: Tensor) -> None:
        """A parameter that is stored on the host was given a gradient."""
        if name in self._sharded:
            mark_gradient(parameter)
