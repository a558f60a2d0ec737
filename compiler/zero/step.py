"""One forward pass and its backward: parameters gathered ahead, gradients reduced in groups.

    Enter -> tokens -> UseGroup (one per instance and group) -> region ops -> ... -> Leave
    forward    G0 | F0 [wait 0, G1, ops] X0 | F1 [wait 1, G2, ops] X1 | ... | Fn
    backward   G n-1 | Bn, reduce n | G n-2, B n-1, reduce n-1 | ... | wait all reductions, .grad

Autograd runs the nodes of a graph in falling order of creation: UseGroup (meshfold.zero.graph_ops)
is younger than the regions before its own, and Enter is the oldest node: its backward comes last,
waits for all reductions, adds up the uses of tied parameters and returns gradients of shards, which
autograd accumulates itself. Tokens are empty tensors that carry nothing but this order. Reductions
that share a bucket (meshfold.ir.bucketing) start with the last of their members.

Gathered parameters are released after a region's forward. Autograd saves a note instead (saved
tensor hooks) and the backward regathers them, one region ahead: two regions are unsharded at most.
The last region stays unsharded for its backward, and so do regions without resharding after forward
(ZeRO 1 and 2), these for all microbatches of a step (meshfold.zero.microbatch_state). What a region
recomputes (meshfold.runtime.recomputation) needs no notes; it regathers in the same order.
"""

from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor

from meshfold.distributed.deferred_weight_grads import DeferredWeightGrads
from meshfold.distributed.step_context import StepContext
from meshfold.errors import MeshfoldError
from meshfold.hierarchical_all_reduce import HierarchicalAllReduce
from meshfold.torch_compat.dtypes import torch_dtype
from meshfold.zero.gradient_reduction import Reducing, Reduction
from meshfold.zero.hierarchical_all_reduce import AllReduces
from meshfold.zero.host_side import HostSide, NoHostSide
from meshfold.zero.last_reductions import Gradients, finish_reductions
from meshfold.zero.layer_copies import InstanceCopies
from meshfold.zero.microbatch_state import Key, SharedStep
from meshfold.zero.parameter_gather import Gather, Gathered
from meshfold.zero.parameter_group import GroupBuffers
from meshfold.zero.shard_sums import are_early, leave, lone_shards, on_device

SECOND_BACKWARD = (
    "backward through a step that has already run backward: the gradients of a step are reduced "
    "once; run the model again, or add losses up before backward"
)


class GroupUse:
    """A parameter group of one region instance during one pass. `token` is set by
    step_ends.enter. reshard_after_forward: else what is gathered is resident until the last
    backward of the step. reduce_on_last_microbatch: gradients are reduced with the last microbatch,
    else with every one."""

    def __init__(
        self,
        step: "TrainingStep",
        instance: int,
        buffers: GroupBuffers,
        shards: Sequence[Tensor],
        number: int = 0,
        *,
        reshard_after_forward: bool = True,
        reduce_on_last_microbatch: bool = False,
    ) -> None:
        self.instance = instance
        self.key: Key = (instance, number)
        self.reshard_after_forward = reshard_after_forward or not buffers.group.gather
        self.reduce_on_last_microbatch = reduce_on_last_microbatch or not buffers.group.gather
        self.group = buffers.group
        self.token: Tensor | None = None
        self.is_saved = False
        """Whether backward needs the gathered members again."""
        self.shards = tuple(shards)
        self._step = step
        self._buffers = buffers
        self._gather = tuple(step.mesh.mesh.storage.names[k] for k in self.group.gather)
        self._dtype = torch_dtype(self.group.dtype)
        self._gathers_with: Sequence[GroupUse] = (self,)
        self._gathering: Gather | None = None
        self._unsharded: list[Tensor] | None = None
        self._reduction = self._reduction_of([self])
        self._finished: list[Gradients] = []
        """What the reduction gave, if it was waited for before the end."""

    @property
    def deferred(self) -> DeferredWeightGrads | None:
        """Where gradients of weights wait, under a schedule that splits the backward."""
        return self._step.context.deferred

    def start_gather(self) -> None:
        """Start the all-gather unless it is in flight or done."""
        if self._needs_gather():
            uses = [use for use in self._gathers_with if use._joins(self)]
            members = [Gathered(use.key, use._buffers, use._narrow()) for use in uses]
            gather = Gather(self._step.mesh, self._gather, members)
            for use in uses:
                use._gathering = gather

    def _needs_gather(self) -> bool:
        shared = self._step.shared
        is_there = self._unsharded is not None or self.key in shared.unsharded
        is_on_its_way = self._gathering is not None or self.key in shared.started
        return bool(self._gather) and not (is_there or is_on_its_way)

    def hand_over(self) -> None:
        """Leave a gather in flight to the first microbatch."""
        if self._gathering is not None:
            self._step.shared.started[self.key] = self._gathering
            self._gathering = None

    def _joins(self, first: "GroupUse") -> bool:
        """Whether this is gathered together with `first`, which comes first: in the backward, if it
        is read again."""
        if self._step.is_backward:
            is_wanted = self is first or self.is_saved and self.instance <= first.instance
        else:
            is_wanted = self.instance >= first.instance
        return is_wanted and self._needs_gather()

    def members(self) -> list[Tensor]:
        """The members as the ops read them, waiting for the gather."""
        if not self.group.is_materialized:
            return self._narrow()
        if self._unsharded is None:
            self._unsharded = self._gathered() if self._gather else self._narrow()
            self._step.note_unsharded(self, self._unsharded)
        return self._unsharded

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor on the memory of a member is in its dtype: told by its offset then."""
        return tensor.dtype == self._dtype

    def _narrow(self) -> list[Tensor]:
        """The shards in the dtype that ops read."""
        for shard in self.shards:
            self._step.host_side.arrive(shard)
        return [s.detach().to(self._dtype) for s in self.shards]

    def _gathered(self) -> list[Tensor]:
        if self.key in self._step.shared.unsharded:
            return self._step.shared.unsharded[self.key]
        self.start_gather()
        gathering = self._step.shared.started.pop(self.key, self._gathering)
        assert gathering is not None
        unsharded = gathering.take(self.key)
        self._gathering = None
        if not self.reshard_after_forward:
            self._step.shared.unsharded[self.key] = unsharded
        return unsharded

    def release(self) -> None:
        """Forget the gathered members, if not resharded after forward in the last microbatch."""
        if self._step.shared.is_last:
            self._step.shared.unsharded.pop(self.key, None)
        if self._unsharded is not None:
            self._step.forget_unsharded(self._unsharded)
            self._unsharded = None

    def will_be_recomputed(self) -> None:
        """Backward reads the members outside the notes of autograd: a region is recomputed."""
        self.is_saved = self.group.is_materialized and self.reshard_after_forward

    def start_reduction(self, gradients: Sequence[Tensor | None]) -> None:
        """Hand the members' gradients to their reduction; the members are no longer needed."""
        self.release()
        self._reduction.pack(self.key, gradients, like=self.shards[0])
        self._step.note_reduction(self)

    def start_unfinished_reduction(self) -> None:
        """See Reduction."""
        self._reduction.start_unfinished()

    def finish_reduction(self) -> Gradients:
        """Gradients of the shards, after the first collective, but those that are on the host; None
        if there was no gradient."""
        if self._finished:
            return self._finished.pop()
        return self._reduction.finish(self.key)

    def leave_early(self) -> bool:
        """See shard_sums; whether the reduction was started."""
        if not self._reduction.is_started:
            return False
        step = self._step
        self._finished = [leave(self, self.finish_reduction(), step.host_side, step.shared)]
        return True

    def adds_up(self, member: int) -> bool:
        """Whether the gradient of a shard is reduced with every microbatch, and goes to autograd
        with the last one alone."""
        shard = self.shards[member]
        is_lone = id(shard) in self._step.lone_shards
        return is_lone and not (self.reduce_on_last_microbatch or self._step.host_side.takes(shard))

    @property
    def sums_replicas(self) -> bool:
        return self._reduction.sums_replicas

    @staticmethod
    def gather_together(uses: Sequence["GroupUse"]) -> None:
        """Gather the parameters of several groups together, which are alike in axes and dtype."""
        for use in uses:
            use._gathers_with = uses

    @staticmethod
    def reduce_together(uses: Sequence["GroupUse"]) -> None:
        """Reduce the gradients of several groups together, which are alike in axes and dtype."""
        together = uses[0]._reduction_of(uses)
        for use in uses:
            use._reduction = together

    def _reduction_of(self, uses: Sequence["GroupUse"]) -> Reduction:
        members = [(use.key, use._buffers) for use in uses]
        is_last = self.reduce_on_last_microbatch
        return Reduction(self._step.reducing, members, on_last_microbatch=is_last)


class TrainingStep:
    """State of one forward and backward. `uses[k]` are the groups of instance k. shared: by
    the microbatches of a step. waits_at_once: nothing is gathered ahead, and reductions are waited
    for where they start: what overlap is measured against. hierarchical: which all-reduces
    run so. host_side: of parameters that are stored there."""

    def __init__(
        self,
        context: StepContext,
        shared: SharedStep,
        *,
        waits_at_once: bool = False,
        hierarchical: HierarchicalAllReduce | None = None,
        host_side: HostSide | None = None,
    ) -> None:
        self.context = context
        self.host_side: HostSide = host_side or NoHostSide()
        self._leaving: list[GroupUse] = []
        """Whose gradients are to leave early, in the order of their reductions."""
        self.lone_shards: frozenset[int] = frozenset()
        self.mesh = mesh = context.mesh
        self.shared = shared
        self.waits_at_once = waits_at_once
        self.reducing = Reducing(mesh, shared, waits_at_once, AllReduces(mesh, hierarchical))
        self.uses: list[list[GroupUse]] = []
        self.copies = InstanceCopies(self.host_side)
        self.is_backward = False
        self.is_recording = torch.is_grad_enabled()
        self._unsharded: dict[int, tuple[GroupUse, int]] = {}
        self._at = -1
        self._busy = -1
        """The following instance, until its backward is over."""
        self._is_done = False

    def trained(self) -> list[GroupUse]:
        """The uses whose parameters have gradients."""
        return [u for u in chain.from_iterable(self.uses) if u.group.requires_grad]

    def start_gathers(self, instance: int) -> None:
        """G: start the gathers of an instance's groups."""
        for use in () if self.waits_at_once else self.uses[instance]:
            use.start_gather()

    def gather_ahead(self, opened: Sequence[int]) -> None:
        """Before the first microbatch is there: start what is gathered once per step, and all that
        the instances `opened` read."""
        for instance, uses in enumerate(() if self.waits_at_once else self.uses):
            for use in uses:
                if instance in opened or not use.reshard_after_forward:
                    use.start_gather()
        for use in chain.from_iterable(self.uses):
            use.hand_over()

    def release(self, instance: int) -> None:
        """X: drop the gathered parameters of an instance, but those without resharding after
        forward."""
        for use in (u for u in self.uses[instance] if u.reshard_after_forward):
            use.release()

    def saved_tensors(self) -> torch.autograd.graph.saved_tensors_hooks:
        """While open, autograd saves notes instead of gathered parameters."""
        return torch.autograd.graph.saved_tensors_hooks(self.saved, _unpack)

    def note_unsharded(self, use: GroupUse, members: Sequence[Tensor]) -> None:
        """`members` are unsharded now; a saved tensor on their memory is theirs."""
        for k, member in enumerate(members):
            self._unsharded[member.untyped_storage().data_ptr()] = (use, k)

    def forget_unsharded(self, members: Sequence[Tensor]) -> None:
        for member in members:
            self._unsharded.pop(member.untyped_storage().data_ptr(), None)

    def saved(self, tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        """What autograd saves of a tensor: it, or what regathers it."""
        owner = self._unsharded.get(tensor.untyped_storage().data_ptr())
        # Detached, or an op that saves its own output would hold itself alive.
        if owner is None:
            return self.host_side.note(tensor) or tensor.detach()
        use, member = owner
        if not use.owns(tensor):
            return tensor.detach()
        use.is_saved = use.reshard_after_forward
        size, stride, offset = tensor.size(), tensor.stride(), tensor.storage_offset()

        def regather() -> Tensor:
            self.arrive(use.instance)
            return use.members()[member].as_strided(size, stride, offset)

        return regather

    # Backward.

    def begin_backward(self) -> None:
        if self._is_done:
            raise MeshfoldError(SECOND_BACKWARD)
        self._at = len(self.uses)
        self.is_backward = True
        self.lone_shards = lone_shards(self.trained())
        for use in chain.from_iterable(self.uses):
            if use.reshard_after_forward and not use.is_saved:
                use.release()
        self.prefetch_before(len(self.uses))

    def note_reduction(self, use: GroupUse) -> None:
        """A use has handed its gradients over. Those of regions behind leave (shard_sums): their
        reductions had this region's backward to run beside."""
        adds = not use.reduce_on_last_microbatch
        if not are_early(self.shared, self.host_side, use.shards, adds=adds):
            return
        behind = [u for u in self._leaving if u.instance > use.instance and u.leave_early()]
        self._leaving = [*(u for u in self._leaving if u not in behind), use]

    def finish_reductions(self) -> list[Gradients]:
        """Of the trained uses what is still to be given to autograd."""
        of = self.mesh, self.shared, self.reducing.all_reduces
        found = finish_reductions(self.trained(), *of)
        pairs = zip(self.trained(), found, strict=True)
        return [on_device(use, gradients, self.host_side) for use, gradients in pairs]

    def finish_backward(self) -> None:
        self._is_done = True
        self._leaving.clear()
        self.host_side.end_backward()
        self.mesh.place.region = ""
        self._release_from(0)

    def arrive(self, instance: int, *, prefetches: bool = True, is_begun: bool = False) -> None:
        """Backward has come to `instance`: everything later is done, what comes next starts.
        is_begun: the instance behind is not over, see leave_instance."""
        if self._is_done:
            raise MeshfoldError(SECOND_BACKWARD)
        if instance in (self._at, self._busy):
            return
        self._at = instance
        self._busy = instance + 1 if is_begun else -1
        self._release_from(instance + 1 + is_begun)
        saved = [u for u in self.uses[instance] if u.is_saved]
        for use in saved:
            use.start_gather()
        for use in saved:
            use.members()
        if prefetches:
            self.prefetch_before(instance)

    def enter(self, instance: int) -> None:
        """The forward of an instance begins: parameters come that do so layer by layer."""
        if self.copies.is_empty:
            return
        # The last members are not released in forward, and these are on memory that goes.
        for use in self.uses[instance - 1] if instance else ():
            if not use.group.gather and self.host_side.has_by_layer(use.shards):
                use.release()
        self.copies.enter(instance)

    def come_to(self, instance: int, _: Tensor | None = None) -> None:
        """The gradient of what an instance returned is there: its backward is next."""
        if not self._is_done:
            self._release_from(instance + 1)
            self.copies.enter(instance, is_backward=True)

    def leave_instance(self) -> None:
        """The instance behind is over."""
        self._release_from(self._at + 1)
        self._busy = -1

    def _release_from(self, first: int) -> None:
        """Nobody needs the parameters of these instances any more."""
        for use in chain.from_iterable(self.uses[first:]):
            use.release()

    def prefetch_before(self, instance: int) -> None:
        """Start the gathers of the nearest earlier instance that regathers them."""
        for earlier in () if self.waits_at_once else reversed(range(instance)):
            saved = [u for u in self.uses[earlier] if u.is_saved]
            for use in saved:
                use.start_gather()
            if saved:
                return


def _unpack(saved: Tensor | Callable[[], Tensor]) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved()
