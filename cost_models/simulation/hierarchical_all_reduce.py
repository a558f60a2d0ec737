"""Reductions of gradients on the streams of a simulated rank, some of them in steps: hierarchical
all-reduces (meshfold.ir.node_groups), and reduce-scatters whose shards are summed over the replicas
of HSDP; as meshfold.zero.gradient_reduction runs them."""

from collections.abc import Generator

from meshfold.cost_models.simulation.streams import Streams, Transfer
from meshfold.hierarchical_all_reduce import Interleaver
from meshfold.ir.step_events import CollectiveEvent


class HierarchicalReduction:
    """A reduction in steps. extra_bytes: of the shard that crosses nodes, besides the gradients
    themselves; what is scattered and summed is the result, and no more than that. result_bytes: of
    what is gathered in the end, beside what it was made of."""

    def __init__(self, of: CollectiveEvent) -> None:
        self.is_scattered = of.kind == "reduce_scatter"
        self.extra_bytes = 0 if self.is_scattered else of.pieces * of.steps[1].num_bytes
        self.result_bytes = 0 if self.is_scattered else of.pieces * of.steps[-1].num_bytes
        self._of = of
        self._last: Transfer | None = None

    @property
    def is_done(self) -> bool:
        """Whether its buffers are free: of what is scattered after the first step."""
        return self._last is not None and self._last.is_done

    def run(self, streams: Streams, instance: int) -> Generator[None, None, None]:
        first, *others = self._of.steps
        flying = [streams.start(first, instance) for _ in range(self._of.pieces)]
        if self.is_scattered:
            self._last = flying[0]
        for step in others:
            yield
            for k, piece in enumerate(flying):
                streams.wait(piece)
                flying[k] = streams.start(step, instance)
        if not self.is_scattered:
            self._last = flying[-1]
        yield
        for piece in flying:
            streams.wait(piece)


class ReductionStreams:
    """All reductions of a step."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._interleaver: Interleaver[None] = Interleaver()
        self._running: dict[HierarchicalReduction, Generator[None, None, None]] = {}

    def start(self, of: CollectiveEvent, instance: int = -1) -> Transfer | HierarchicalReduction:
        if not of.steps:
            return self._streams.start(of, instance)
        one = HierarchicalReduction(of)
        self._running[one] = one.run(self._streams, instance)
        self._interleaver.begin(self._running[one], len(of.steps))
        return one

    def finish(self, one: Transfer | HierarchicalReduction) -> None:
        """Wait until it is done."""
        if isinstance(one, Transfer):
            self._streams.wait(one)
        else:
            self._interleaver.finish(self._running.pop(one))
