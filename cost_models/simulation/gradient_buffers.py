"""Buffers of gradients during a simulated backward, and the reductions that read them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from meshfold.cost_models.simulation.hierarchical_all_reduce import (
    HierarchicalReduction,
    ReductionStreams,
)
from meshfold.cost_models.simulation.streams import Transfer
from meshfold.ir.step_events import CollectiveEvent, ParameterGroupEvents, ReduceBucket


class _Bucket:
    """Reductions in one collective. packed: members whose gradients are computed; reading: what
    reads the buffer longer than the last one's backward."""

    def __init__(self, of: ReduceBucket) -> None:
        self.of = of
        self.packed = 0
        self.flat_bytes = 0
        self.reading: Transfer | HierarchicalReduction | None = None

    @property
    def has_all(self) -> bool:
        return self.packed == len(self.of.groups)

    @property
    def is_done(self) -> bool:
        """Whether nothing needs the buffer any more."""
        return self.has_all and (self.reading is None or self.reading.is_done)


@dataclass
class _Results:
    """Of reductions. are_known: whether gradients of the instance are reduced at all."""

    are_known: bool = False
    num_bytes: int = 0
    reductions: list[Transfer | HierarchicalReduction] = field(default_factory=list)


_Reading = Transfer | HierarchicalReduction | _Bucket | None


class GradientBuffers:
    """groups: the parameter groups of each instance; buckets: reductions of several in one.
    adds_shards: whether what is reduce-scattered with every microbatch is added to sums there are,
    behind the next instance (meshfold.zero.shard_sums)."""

    def __init__(
        self,
        reducing: ReductionStreams,
        groups: Sequence[Sequence[ParameterGroupEvents]],
        buckets: Sequence[ReduceBucket],
        *,
        adds_shards: bool = False,
    ) -> None:
        self.started: list[Transfer | HierarchicalReduction] = []
        self._reducing = reducing
        self._groups = groups
        self._buckets = {group: b for b in map(_Bucket, buckets) for group in b.of.groups}
        self._result_bytes = 0
        """Of reductions that began in this backward; after it they are resident gradients."""
        self._adds_shards = adds_shards
        self._own, self._behind = _Results(), _Results()
        """Of the instance that runs, and of the one before, which are added to their sums."""
        self._flying: list[tuple[_Reading, int]] = []
        """Buffers of gradients, and the reductions that read them longer than one backward."""
        self._leaving: list[tuple[_Reading, int]] = []
        """The same for gradients that are inside this backward, or resident until its end."""
        self._waiting_bytes = 0
        """Of buffers of reductions whose last member is still to come."""

    @property
    def num_bytes(self) -> int:
        """What is alive now."""
        flying = 0
        for reading, size in self._flying:
            if reading is None or not reading.is_done:
                flying += size
        return flying + self._result_bytes + self._behind.num_bytes + self._waiting_bytes

    def reduce(self, instance: int, number: int) -> None:
        """The gradients of a group are there."""
        group, bucket = self._groups[instance][number], self._buckets.get((instance, number))
        if bucket is not None:
            self._pack(bucket, instance, group)
        else:
            reduction = None
            if group.reduce:
                reduction = self._start(group.reduce, instance)
                self._note_results(group.reduce, [group])
            is_here = group.adds_to_sum or group.reduce and group.reduces_gradient
            of = self._leaving if is_here else self._flying
            of.append((reduction, group.flat_bytes))
        self._result_bytes += group.result_bytes

    def end_instance(self) -> None:
        """A backward is over: results count as gradients, buffers stay while a link reads them."""
        self._result_bytes = 0
        if self._own.are_known:
            for reduction in self._behind.reductions:
                self._reducing.finish(reduction)
                self.started.remove(reduction)
            self._behind, self._own = self._own, _Results()
        flying = (*self._flying, *self._leaving)
        self._flying = [(t, n) for t, n in flying if t is not None and not t.is_done]
        self._leaving = []

    def begin_epilogue_step(self) -> tuple[int, int]:
        """A mark for end_epilogue_step."""
        return self._result_bytes, len(self._flying)

    def end_epilogue_step(self, mark: tuple[int, int]) -> None:
        """Another instance has run the reductions since the mark: their gradients are resident
        already."""
        self._result_bytes, before = mark
        new = self._flying[before:]
        self._flying = [*self._flying[:before], *((t, n) for t, n in new if t is not None)]

    def end_backward(self) -> None:
        """All reductions have been waited for."""
        self._flying = []

    def _start(self, of: CollectiveEvent, instance: int) -> Transfer | HierarchicalReduction | None:
        """What reads the buffer of gradients longer than this backward, if anything: what is not
        scattered is the gradient itself, and resident as such from the next moment."""
        reduction = self._reducing.start(of, instance)
        self.started.append(reduction)
        if isinstance(reduction, HierarchicalReduction) and not reduction.is_scattered:
            self._flying.append((reduction, reduction.extra_bytes))
            self._result_bytes += reduction.result_bytes
            return None
        return reduction if of.kind == "reduce_scatter" else None

    def _pack(self, bucket: _Bucket, instance: int, group: ParameterGroupEvents) -> None:
        """The first member allocates the buffer of all, unless it is the sum of earlier
        microbatches; the last one starts the reduction."""
        of = bucket.of.collective
        bucket.packed += 1
        if group.adds_to_sum:
            if bucket.has_all:
                bucket.reading = self._start(of, instance)
            if of.kind == "reduce_scatter":
                self._leaving.append((bucket, group.flat_bytes))
            return
        if bucket.packed == 1:
            bucket.flat_bytes = sum(self._groups[i][k].flat_bytes for i, k in bucket.of.groups)
            self._waiting_bytes += bucket.flat_bytes
        if of.kind != "reduce_scatter":
            self._waiting_bytes -= group.flat_bytes
            self._flying.append((None, group.flat_bytes))
        elif bucket.has_all:
            self._waiting_bytes -= bucket.flat_bytes
        self._own.are_known = self._adds_shards
        if bucket.has_all:
            reading = self._start(of, instance)
            if reading is not None:
                self._flying.append((reading, bucket.flat_bytes))
            self._note_results(of, [self._groups[i][k] for i, k in bucket.of.groups])

    def _note_results(self, of: CollectiveEvent, groups: Sequence[ParameterGroupEvents]) -> None:
        """What has just started gives shards that are added to their sums."""
        if self._adds_shards and of.kind == "reduce_scatter" and not groups[0].adds_to_sum:
            self._own.are_known = True
            self._own.reductions.append(self.started[-1])
            self._own.num_bytes += sum(group.result_bytes for group in groups)
