"""One forward pass and its backward: parameters gathered ahead, gradients reduced in buckets.

    Enter -> tokens -> UseBucket (one per instance and bucket) -> region ops -> ... -> Leave
    forward    G0 | F0 [wait 0, G1, ops] X0 | F1 [wait 1, G2, ops] X1 | ... | Fn
    backward   G n-1 | Bn, reduce n | G n-2, B n-1, reduce n-1 | ... | wait all reductions, .grad

Autograd runs the nodes of a graph in falling order of creation: UseBucket (meshfold.zero.graph_ops) is
younger than the regions before its own, and Enter is the oldest node: its backward comes last,
waits for all reductions, adds up the uses of tied parameters and returns gradients of shards, which
autograd accumulates itself. Tokens are empty tensors that carry nothing but this order. Reductions
that are merged (meshfold.ir.bucketing) start with the last of their members.

Gathered parameters are released after a region's forward. Autograd keeps a note instead (saved
tensor hooks) and the backward gathers again, one region ahead: two regions are whole at most, and
with merged gathers a region beside the buffers of two groups.
The last region stays whole for its backward, and so do regions that keep what is gathered (ZeRO 1
and 2), these for all microbatches of a step (meshfold.zero.microbatch_state). A region with full
recomputation (meshfold.runtime.recomputation) keeps no notes; it gathers again in the same turn.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshfold.distributed.deferred_weight_grads import WeightWork
from meshfold.distributed.rank_mesh import RankMesh
from meshfold.errors import MeshfoldError
from meshfold.ir.node_groups import Hierarchy
from meshfold.ops.registry import torch_dtype
from meshfold.zero.gradient_reduction import Reducing, Reduction
from meshfold.zero.hierarchical_all_reduce import AllReduces
from meshfold.zero.microbatch_state import SharedStep
from meshfold.zero.parameter_gather import Gather, Gathered
from meshfold.zero.parameter_group import BucketBuffers

SECOND_BACKWARD = (
    "backward through a step that has already run backward: the gradients of a step are reduced "
    "once; run the model again, or add losses up before backward"
)


class BucketUse:
    """A bucket of one region instance during one pass. `token` is set by TrainingStep.enter. stays:
    what is gathered is kept until the last backward of the step. is_late: gradients are reduced
    with the last microbatch, else with every one."""

    def __init__(
        self,
        step: "TrainingStep",
        instance: int,
        buffers: BucketBuffers,
        shards: Sequence[Tensor],
        number: int = 0,
        *,
        stays: bool = False,
        is_late: bool = False,
    ) -> None:
        self.instance = instance
        self.key = (instance, number)
        self.stays = stays and bool(buffers.bucket.gather)
        self.is_late = is_late or not buffers.bucket.gather
        self.bucket = buffers.bucket
        self.token: Tensor | None = None
        self.is_saved = False
        """Whether backward needs the gathered members again."""
        self.shards = tuple(shards)
        self._step = step
        self._buffers = buffers
        names = step.mesh.mesh.names
        self._gather = tuple(names[k] for k in self.bucket.gather)
        self._dtype = torch_dtype(self.bucket.dtype)
        self._gathers_with: Sequence[BucketUse] = (self,)
        self._gathering: Gather | None = None
        self._whole: list[Tensor] | None = None
        self._reduction = Reduction(step.reducing, [(self.key, buffers)], is_late=self.is_late)

    @property
    def weight_work(self) -> WeightWork | None:
        """Where gradients wait, of a schedule that splits the backward."""
        return self._step.mesh.weight_work

    def start_gather(self) -> None:
        """Start the all-gather unless it is in flight or done."""
        if self._needs_gather():
            uses = [use for use in self._gathers_with if use._joins(self)]
            members = [Gathered(use.key, use._buffers, use._narrow()) for use in uses]
            gather = Gather(self._step.mesh, self._gather, members)
            for use in uses:
                use._gathering = gather

    def _needs_gather(self) -> bool:
        is_there = self._whole is not None or (self.stays and self.key in self._step.shared.whole)
        return bool(self._gather) and self._gathering is None and not is_there

    def _joins(self, first: "BucketUse") -> bool:
        """Whether this is gathered together with `first`, which comes first: in the backward, if it
        is read again."""
        if self._step.is_backward:
            is_wanted = self is first or self.is_saved and self.instance <= first.instance
        else:
            is_wanted = self.instance >= first.instance
        return is_wanted and self._needs_gather()

    def members(self) -> list[Tensor]:
        """The members as the ops read them, waiting for the gather."""
        if not self.bucket.is_made:
            return self._narrow()
        if self._whole is None:
            self._whole = self._gathered() if self._gather else self._narrow()
            self._step.note_whole(self, self._whole)
        return self._whole

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor on the memory of a member is in its dtype, so that it can be told by
        place."""
        return tensor.dtype == self._dtype

    def _narrow(self) -> list[Tensor]:
        """The shards in the dtype that ops read."""
        return [s.detach().to(self._dtype) for s in self.shards]

    def _gathered(self) -> list[Tensor]:
        if self.stays and self.key in self._step.shared.whole:
            return self._step.shared.whole[self.key]
        self.start_gather()
        assert self._gathering is not None
        whole = self._gathering.take(self.key)
        self._gathering = None
        if self.stays:
            self._step.shared.whole[self.key] = whole
        return whole

    def release(self) -> None:
        """Forget the gathered members; those that stay, in the last microbatch."""
        if self.stays and self._step.shared.is_last:
            self._step.shared.whole.pop(self.key, None)
        if self._whole is not None:
            self._step.forget_whole(self._whole)
            self._whole = None

    def will_be_read_again(self) -> None:
        """Backward reads the members outside the notes that autograd keeps: a region runs again."""
        self.is_saved = self.bucket.is_made and not self.stays

    def start_reduction(self, gradients: Sequence[Tensor | None]) -> None:
        """Hand the members' gradients to their reduction; the members are no longer needed."""
        self.release()
        self._reduction.pack(self.key, gradients, like=self.shards[0])

    def start_unfinished_reduction(self) -> None:
        """See Reduction."""
        self._reduction.start_unfinished()

    def finish_reduction(self) -> list[Tensor] | None:
        """Gradients of the shards, after the first collective; None if there was no gradient."""
        return self._reduction.finish(self.key)

    @staticmethod
    def gather_together(uses: Sequence["BucketUse"]) -> None:
        """Gather the parameters of several buckets together, which are alike in axes and dtype."""
        for use in uses:
            use._gathers_with = uses

    @staticmethod
    def reduce_together(uses: Sequence["BucketUse"]) -> None:
        """Reduce the gradients of several buckets together, which are alike in axes and dtype."""
        first = uses[0]
        members = [(use.key, use._buffers) for use in uses]
        merged = Reduction(first._step.reducing, members, is_late=first.is_late)
        for use in uses:
            use._reduction = merged


class TrainingStep:
    """State of one forward and backward. `uses[k]` are the buckets of instance k. shared: by
    the microbatches of a step. waits_at_once: nothing is gathered ahead, and reductions are waited
    for where they start: what overlap is measured against. hierarchy: which run in phases."""

    def __init__(
        self,
        mesh: RankMesh,
        shared: SharedStep,
        *,
        waits_at_once: bool = False,
        hierarchy: Hierarchy | None = None,
    ) -> None:
        self.mesh = mesh
        self.shared = shared
        self.waits_at_once = waits_at_once
        self.reducing = Reducing(mesh, shared, waits_at_once, AllReduces(mesh, hierarchy))
        self.uses: list[list[BucketUse]] = []
        self.is_backward = False
        self.is_recording = torch.is_grad_enabled()
        self._whole: dict[int, tuple[BucketUse, int]] = {}
        self._at = -1
        self._busy = -1
        """The instance behind, while it is not over."""
        self._is_done = False

    def enter(self) -> None:
        """Create the oldest autograd node of the step and hand out the tokens."""
        trained = self.trained()
        if not (self.is_recording and trained):
            return
        shards = list({id(s): s for u in trained for s in u.shards}.values())
        tokens = _Enter.apply(self, trained, *shards)  # type: ignore[no-untyped-call]
        for use, token in zip(trained, tokens, strict=True):
            use.token = token

    def trained(self) -> list[BucketUse]:
        return [u for uses in self.uses for u in uses if u.bucket.requires_grad]

    def leave(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Wrap the outputs: their backward is the first to run."""
        trained = [x for x in outputs if x.requires_grad]
        if not trained:
            return list(outputs)
        wrapped = iter(_Leave.apply(self, *trained))  # type: ignore[no-untyped-call]
        return [next(wrapped) if x.requires_grad else x for x in outputs]

    def start_gathers(self, instance: int) -> None:
        """G: start the gathers of an instance's buckets."""
        for use in () if self.waits_at_once else self.uses[instance]:
            use.start_gather()

    def release(self, instance: int) -> None:
        """X: drop the gathered parameters of an instance, but those that stay."""
        for use in self.uses[instance]:
            if not use.stays:
                use.release()

    # Saved tensors.

    def saved_tensors(self) -> torch.autograd.graph.saved_tensors_hooks:
        """While open, autograd keeps notes instead of gathered parameters."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def note_whole(self, use: BucketUse, members: Sequence[Tensor]) -> None:
        """`members` are whole now; a saved tensor on their memory is theirs."""
        for k, member in enumerate(members):
            self._whole[member.untyped_storage().data_ptr()] = (use, k)

    def forget_whole(self, members: Sequence[Tensor]) -> None:
        for member in members:
            self._whole.pop(member.untyped_storage().data_ptr(), None)

    def _pack(self, tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        owner = self._whole.get(tensor.untyped_storage().data_ptr())
        # Detached, or an op that saves its own output would hold itself alive.
        if owner is None:
            return tensor.detach()
        use, member = owner
        if not use.owns(tensor):
            return tensor.detach()
        use.is_saved = not use.stays
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
        for uses in self.uses:
            for use in uses:
                if not (use.is_saved or use.stays):
                    use.release()
        self.prefetch_before(len(self.uses))

    def finish_backward(self) -> None:
        self._is_done = True
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

    def leave_instance(self) -> None:
        """The instance behind is over."""
        self._release_from(self._at + 1)
        self._busy = -1

    def _release_from(self, first: int) -> None:
        """Nobody needs the parameters of these instances again."""
        for uses in self.uses[first:]:
            for use in uses:
                use.release()

    def prefetch_before(self, instance: int) -> None:
        """Start the gathers of the nearest earlier instance that reads them again."""
        for earlier in () if self.waits_at_once else reversed(range(instance)):
            saved = [u for u in self.uses[earlier] if u.is_saved]
            for use in saved:
                use.start_gather()
            if saved:
                return


def _unpack(saved: Tensor | Callable[[], Tensor]) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, step: TrainingStep, uses: list[BucketUse], *shards: Tensor
    ) -> tuple[Tensor, ...]:
        # Weak: its uses hold tokens made here, in a cycle that no garbage collector sees.
        ctx.step = weakref.ref(step)
        ctx.shards = {id(s): k for k, s in enumerate(shards)}
        ctx.set_materialize_grads(False)
        # On the parameters' device, so that one autograd thread runs the whole backward.
        return tuple(shards[0].new_empty(0) for _ in uses)

    @staticmethod
    def backward(ctx: Any, *tokens: Tensor | None) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] = [None] * len(ctx.shards)
        step: TrainingStep = ctx.step()
        for use, parts in zip(step.trained(), _finish_all(step, step.trained()), strict=True):
            for shard, part in zip(use.shards, parts or (), strict=parts is not None):
                if part is None:
                    continue
                k = ctx.shards[id(shard)]
                before = gradients[k]
                gradients[k] = part if before is None else before + part
        step.finish_backward()
        return None, None, *gradients


def _finish_all(step: TrainingStep, uses: Sequence[BucketUse]) -> list[list[Tensor | None] | None]:
    """Wait for the reductions of all uses, in the order in which they were started. Members that
    are also Invariant -> Replicate on other axes than the gathered ones are all-reduced as shards,
    together per set of axes, with the last microbatch; before it they have no gradient."""
    mesh = step.mesh
    for use in reversed(uses):
        use.start_unfinished_reduction()
    found = {id(u): u.finish_reduction() for u in reversed(uses)}
    gradients: list[list[Tensor | None] | None] = [
        None if parts is None else list(parts) for parts in (found[id(u)] for u in uses)
    ]
    second: dict[tuple[tuple[int, ...], torch.dtype], list[tuple[list[Tensor | None], int]]] = {}
    for use, parts in zip(uses, gradients, strict=True):
        if parts is None or not use.bucket.gather:
            continue
        for m, member in enumerate(use.bucket.members):
            part = parts[m]
            if member.reduce and part is not None:
                parts[m] = total = step.shared.add((*use.key, m), part)
                if total is not None:
                    second.setdefault((member.reduce, total.dtype), []).append((parts, m))
    started = []
    all_reduces = step.reducing.all_reduces
    for (axes, _), places in second.items():
        shards = [shard for parts, m in places if (shard := parts[m]) is not None]
        flat = torch.cat([shard.reshape(-1) for shard in shards])
        names = tuple(mesh.mesh.names[k] for k in axes)
        started.append((places, [shard.shape for shard in shards], all_reduces.start(flat, names)))
    for places, shapes, sums in started:
        pieces = torch.split(all_reduces.finish(sums), [s.numel() for s in shapes])
        for (parts, m), shape, piece in zip(places, shapes, pieces, strict=True):
            parts[m] = piece.view(shape)
    return gradients


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: TrainingStep, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.step = step
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.step.begin_backward()
        return None, *gradients
