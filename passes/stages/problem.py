"""The stage level's problem: a chain of layers to be divided into the stages of a pipeline.

The chain is a sequence of runs of layer types in topological order; embedding, head and loss are
runs like any other and count on the stage they fall on. Every layer takes one strategy of its
type. A stage that holds the layers [a, b) with k microbatches in flight needs

    sum of state_bytes + k * (sum of activation_bytes + resident_bytes[a]) + max of transient_bytes

at every moment, and where the backward is split, w * put_off_bytes of every layer for w
microbatches between B and W. Of these a layer keeps at least update_bytes, while there are any:
what the optimizer takes at the end of the step, when nothing of a microbatch is left. That must not
exceed the memory of its device. Layers of a stage run at forward_s and backward_s per microbatch;
sync_s is paid once per step, after the stage's last backward (gradient reduction that nothing
hides). Plain data, no torch: tables come from the region search or from a profile.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from meshfold.errors import OptionError
from meshfold.passes.run.hull import FloatArray, IntArray

InFlight = tuple[int, ...]
"""Microbatches of a stage before the end of B at one moment, and where it is split, between B and
W."""

Moments = tuple[InFlight, ...]
"""The fullest moments of a stage (schedules.counted_in_flight)."""


@dataclass(frozen=True, eq=False)
class LayerCosts:
    """What one layer of a type costs under each strategy; build with `LayerCosts.build`.

    Per microbatch: forward_s, backward_s, of which weight_s for weight gradients,
    activation_bytes, and put_off_bytes, which a split backward keeps from B to W instead, as many
    where nothing else is said. Per step: sync_s, state_bytes (parameters, gradients, optimizer
    state), update_bytes (what the optimizer takes instead of activations), transient_bytes (of
    which a stage pays the largest only). Strategies are in the order of
    their names, so that the order they came in decides nothing.
    """

    name: str
    strategies: tuple[str, ...]
    forward_s: FloatArray
    backward_s: FloatArray
    weight_s: FloatArray
    sync_s: FloatArray
    state_bytes: IntArray
    activation_bytes: IntArray
    transient_bytes: IntArray
    put_off_bytes: IntArray
    update_bytes: IntArray

    @classmethod
    def build(
        cls,
        name: str,
        strategies: tuple[str, ...],
        *,
        forward_s: ArrayLike,
        backward_s: ArrayLike,
        state_bytes: ArrayLike,
        activation_bytes: ArrayLike,
        weight_s: ArrayLike = 0.0,
        sync_s: ArrayLike = 0.0,
        transient_bytes: ArrayLike = 0,
        put_off_bytes: ArrayLike | None = None,
        update_bytes: ArrayLike = 0,
    ) -> "LayerCosts":
        """Scalars count for every strategy. Raises OptionError for negative or fractional bytes,
        negative or infinite times, and shapes that do not fit."""
        if not strategies or len(set(strategies)) < len(strategies):
            raise OptionError(f"layer {name}: strategies need unique names, at least one")
        order = sorted(range(len(strategies)), key=lambda s: strategies[s])

        def seconds(key: str, values: ArrayLike) -> FloatArray:
            return _column(f"layer {name}: {key}", values, order)

        def integers(key: str, values: ArrayLike) -> IntArray:
            column = seconds(key, values)
            if np.any(column != np.floor(column)):
                raise OptionError(f"layer {name}: {key} must be whole numbers")
            return column.astype(np.int64)

        costs = cls(
            name,
            tuple(strategies[s] for s in order),
            seconds("forward_s", forward_s),
            seconds("backward_s", backward_s),
            seconds("weight_s", weight_s),
            seconds("sync_s", sync_s),
            integers("state_bytes", state_bytes),
            integers("activation_bytes", activation_bytes),
            integers("transient_bytes", transient_bytes),
            integers("put_off_bytes", activation_bytes if put_off_bytes is None else put_off_bytes),
            integers("update_bytes", update_bytes),
        )
        if np.any(costs.weight_s > costs.backward_s):
            raise OptionError(
                f"layer {name}: weight_s is longer than backward_s, which includes it"
            )
        return costs

    def bytes_with(self, in_flight: InFlight) -> IntArray:
        """States, and what is kept of so many microbatches, by strategy."""
        return self.state_bytes + self.kept_bytes(in_flight).astype(np.int64)

    def kept_bytes(self, in_flight: Sequence[ArrayLike]) -> FloatArray:
        """Of so many microbatches before the end of B and, where it is split and these are counted
        apart, so many between B and W; where there are any, for the update behind them at least."""
        kept, any_left = self.passes_bytes(in_flight), sum(map(np.asarray, in_flight)) > 0
        return np.where(any_left, np.maximum(kept, self.update_bytes), kept)

    def passes_bytes(self, in_flight: Sequence[ArrayLike]) -> FloatArray:
        """Of kept_bytes what is of microbatches; linear in their numbers."""
        tables = (self.activation_bytes, self.put_off_bytes)
        each = [np.multiply(n, table) for n, table in zip(in_flight, tables, strict=False)]
        return np.asarray(sum(each), float)

    def only(self, strategy: int) -> "LayerCosts":
        """The same layer under one strategy, by number."""
        at = slice(strategy, strategy + 1)
        return LayerCosts(
            self.name,
            self.strategies[at],
            self.forward_s[at],
            self.backward_s[at],
            self.weight_s[at],
            self.sync_s[at],
            self.state_bytes[at],
            self.activation_bytes[at],
            self.transient_bytes[at],
            self.put_off_bytes[at],
            self.update_bytes[at],
        )

    @property
    def total_s(self) -> FloatArray:
        """Forward and backward of one microbatch."""
        return self.forward_s + self.backward_s


def _column(what: str, values: ArrayLike, order: list[int]) -> FloatArray:
    """`values` for each strategy in `order`; a scalar counts for all."""
    array = np.asarray(values, float)
    if array.shape not in ((), (len(order),)):
        raise OptionError(
            f"{what} has shape {array.shape}, expected one value for each of {len(order)} "
            "strategies"
        )
    if not np.all(np.isfinite(array)) or np.any(array < 0):
        raise OptionError(f"{what} must be finite and not negative")
    return np.broadcast_to(array, (len(order),))[order]


@dataclass(frozen=True)
class LayerRun:
    """`count` >= 1 consecutive layers of one type."""

    layer: LayerCosts
    count: int


@dataclass(frozen=True, eq=False)
class StageProblem:
    """A chain of layers, its devices and links; build with `StageProblem.build`."""

    runs: tuple[LayerRun, ...]
    num_microbatches: int
    memory_bytes: IntArray
    """Budget of each device of the pipeline, shape (p,)."""

    hop_s: FloatArray
    """Seconds that one microbatch takes over a stage boundary, forward or backward, by the number
    of layers before it, shape (L + 1,), 0 at both ends."""

    resident_bytes: IntArray
    """Values from earlier stages (an encoder's output) that a stage keeps for its layers or passes
    on, per microbatch in flight, by its first layer, shape (L + 1,)."""

    @classmethod
    def build(
        cls,
        runs: tuple[LayerRun, ...],
        *,
        num_stages: int,
        num_microbatches: int,
        memory_bytes: ArrayLike,
        hop_s: ArrayLike = 0.0,
        resident_bytes: ArrayLike = 0,
    ) -> "StageProblem":
        """Scalars count for all. hop_s: one value per boundary (L - 1),
        resident_bytes: one per layer (L). Raises OptionError for what does not fit together."""
        num_layers = sum(run.count for run in runs)
        if not runs or min(run.count for run in runs) < 1:
            raise OptionError("a chain needs runs of at least one layer each")
        if num_microbatches < 1 or not 1 <= num_stages <= num_layers:
            raise OptionError(
                f"{num_layers} layers cannot be divided into {num_stages} stages of at least one "
                f"layer for {num_microbatches} microbatches"
            )
        hops, resident = np.zeros(num_layers + 1), np.zeros(num_layers + 1, np.int64)
        try:
            memory = np.broadcast_to(np.asarray(memory_bytes), (num_stages,)).astype(np.int64)
            hops[1:-1] = np.broadcast_to(np.asarray(hop_s, float), (num_layers - 1,))
            resident[1:-1] = np.broadcast_to(np.asarray(resident_bytes), (num_layers,))[1:]
        except ValueError as error:
            raise OptionError(
                f"memory_bytes, hop_s and resident_bytes are one value for each of {num_stages} "
                f"devices, {num_layers - 1} divisions and {num_layers} layers ({error})"
            ) from error
        if np.any(hops < 0) or np.any(resident < 0) or not np.all(np.isfinite(hops)):
            raise OptionError("hop_s and resident_bytes must be finite and not negative")
        return cls(runs, num_microbatches, memory, hops, resident)

    @property
    def num_devices(self) -> int:
        return len(self.memory_bytes)

    def fullest(self, moments: Moments) -> InFlight:
        """The moment at which all layers together keep most, each under the strategy that keeps
        least; of equal ones the last."""

        def kept(in_flight: InFlight) -> float:
            each = (run.count * run.layer.kept_bytes(in_flight).min() for run in self.runs)
            return float(sum(each))

        return max(reversed(moments), key=kept)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First layer of each run, and the number of layers at the end."""
        return (0, *np.cumsum([run.count for run in self.runs]).tolist())

    @property
    def num_layers(self) -> int:
        return self.starts[-1]

    def run_slices(self, first: int, end: int) -> tuple[tuple[int, int], ...]:
        """(run number, number of layers) of the layers [first, end), in order."""
        found = []
        for number, (start, stop) in enumerate(zip(self.starts, self.starts[1:], strict=False)):
            count = min(end, stop) - max(first, start)
            if count > 0:
                found.append((number, count))
        return tuple(found)
