"""Peak memory of one training step, composed from the regions' own peaks.

Instances run forward 0..n-1 and backward n-1..0, so there are 2 n moments, and with S_j what
instance j saves, F_i and B_i the worst moments inside i, and G_j gradients of parameters,

    forward i    sum_{j<i} S_j + F_i
    backward i   sum_{j<i} S_j + B_i + sum_{j>i} G_j           (B_i includes S_i)
    reduction i  sum_{j<i} S_j + R_i + buckets + sum_{j>i} G_j (R_i: when i's gradients are there,
                 and values that its last steps saved are gone)
    sums         G + two gradients of one parameter + their sum, made anew (measured), unless the
                 first one can be added to
    optimizer    states + G + what the optimizer itself needs; no activations

The head is an instance like any other. Also alive, over ranges of moments:

    values between instances   from their making to the last reader, or to the backward of the
                               first instance that saves them; one count per storage
    their gradients            from the backward of the last reader to that of the maker; that
                               with which the backward starts, to its end
    gathered parameters        two instances' worth: the current one and the next in flight; those
                               not resharded, from their forward to their backward; what comes from
                               the host layer by layer likewise, until another instance begins
    buffers in flight          a reduce-scatter still reads its buffer while the next region runs;
                               a gradient that leaves for the host lives as long
    offloaded activations      while the next instance runs forward, and while it runs backward

All bytes are those of one rank. Gradients are fresh each step (set to None by zero_grad): they grow
while activations shrink.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from meshfold.cost_models.memory.live_ranges import RegionMemory
from meshfold.cost_models.memory.parameter_uses import ParameterSums, ParameterUse
from meshfold.cost_models.memory.value_gradients import value_gradients
from meshfold.cost_models.op_costs.optimizers import Update
from meshfold.ir.memory_estimate import MemoryEstimate

InstanceOutput = tuple[int, int]
"""(instance, output)."""

NO_LOSS = -1
"""In place of an instance."""


@dataclass(frozen=True)
class InstanceMemory:
    """An instance of a region. Instances that differ in sources alone share the other objects."""

    memory: RegionMemory
    sources: Mapping[int, InstanceOutput]
    """Where values of other instances are computed, by the slot that takes them."""
    parameters: tuple[ParameterUse, ...]
    is_offloaded: bool = False
    """Whether what it saves inside goes to the host."""
    reshard_after_forward: bool = True
    """Whether gathered parameters are released between forward and backward."""
    by_layer_bytes: int = 0
    """Of parameters that come from the host for each of its forward and backward."""
    sliced_bytes: int = 0
    """Of gradients of slices of parameters, which are put together behind the backward."""


@dataclass(frozen=True, slots=True)
class States:
    """Bytes of one rank that are resident all the time."""

    parameters: int
    trained: int
    """Those parameters that this rank updates."""
    buffers: int
    """Constants included."""
    inputs: int
    """The batch."""
    update: Update = Update()
    """What the optimizer keeps and does for the trained ones."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Bytes at one moment, by component of MemoryEstimate."""

    gradients: int = 0
    activations: int = 0
    gathered: int = 0
    buckets: int = 0
    transient: int = 0
    loss: int = 0

    @property
    def total(self) -> int:
        kept = self.gradients + self.activations + self.gathered + self.buckets
        return kept + self.transient + self.loss


def compose_step(
    instances: Sequence[InstanceMemory],
    model_outputs: Sequence[InstanceOutput],
    states: States,
    *,
    reserve_bytes: int,
    capacity_bytes: int,
    loss: int = NO_LOSS,
) -> tuple[MemoryEstimate, tuple[int, ...]]:
    """(bytes by component at the worst moment, bytes that each instance saves for its backward).

    model_outputs are resident to the end. loss: the instance that computes the loss, whose insides
    are a component of their own.
    """
    timeline = Timeline(instances, model_outputs, loss)
    stepping = Moment(timeline.final_gradients, 0, 0, 0, states.update.step_bytes)
    worst = max([*timeline.moments(), *timeline.sums_of_uses(), stepping], key=lambda m: m.total)
    estimate = MemoryEstimate(
        parameters=states.parameters + states.buffers,
        gradients=worst.gradients,
        optimizer=states.update.state_bytes,
        activations=worst.activations + states.inputs,
        gathered_parameters=worst.gathered,
        buckets=worst.buckets,
        transient=worst.transient,
        reserve=reserve_bytes,
        capacity=capacity_bytes,
        loss=worst.loss,
    )
    return estimate, tuple(timeline.saved)


def resident_over_time(
    instances: Sequence[InstanceMemory],
    model_outputs: Sequence[InstanceOutput],
    states: States,
) -> tuple[int, ...]:
    """Bytes of activations and gradients outside of the instance that runs, at the
    moments of all forwards, then of all backwards, then of the optimizer. What is gathered or in
    a bucket is left out. Arguments: as for compose_step."""
    timeline = Timeline(instances, model_outputs)
    activations, gradients = timeline.activations.totals(), timeline.gradients.totals()
    value_gradients, leaving = timeline.value_gradients.totals(), timeline.leaving.totals()
    # In forward there are no gradients yet: those ranges begin behind it.
    alive = zip(activations, gradients, value_gradients, leaving, strict=True)
    found = [sum(parts) for parts in alive]
    stepping = timeline.final_gradients + states.update.step_bytes
    return (*found, stepping)


class _Ranges:
    """Bytes over moments, added range by range."""

    def __init__(self, num_moments: int) -> None:
        self._changes = [0] * (num_moments + 1)

    def add(self, first: int, last: int, num_bytes: int) -> None:
        """`num_bytes` from moment `first` to `last`, both included; nothing if last < first."""
        if first <= last:
            self._changes[first] += num_bytes
            self._changes[last + 1] -= num_bytes

    def totals(self) -> list[int]:
        return list(accumulate(self._changes))[:-1]


class Timeline:
    """What is alive outside of the instance that runs, at each of the 2 n moments. starts: the
    outputs that the backward starts from; None for the first of the model."""

    def __init__(
        self,
        instances: Sequence[InstanceMemory],
        model_outputs: Sequence[InstanceOutput],
        loss: int = NO_LOSS,
        starts: Sequence[InstanceOutput] | None = None,
    ) -> None:
        self.instances = instances
        self.loss = loss
        self.sums = _sums_of(instances)
        self.last = 2 * len(instances) - 1
        self.saved = [0 if i.is_offloaded else i.memory.saved_bytes for i in instances]
        self.activations = _Ranges(self.last + 1)
        self.value_gradients = _Ranges(self.last + 1)
        self.gradients = _Ranges(self.last + 1)
        self.in_flight = _Ranges(self.last + 1)
        self.leaving = _Ranges(self.last + 1)
        self.unsharded = _Ranges(self.last + 1)
        self.last_resident = 0  # gradients of the first instance, the last to be there
        self.done = [0] * len(instances)  # values that arrived, gone at the reduction
        for i, instance in enumerate(instances):
            self._add_saved(i, instance)
            if not instance.reshard_after_forward:
                self.unsharded.add(i + 1, self.backward(i) - 1, self.sums[i].gathered)
        self._add_values(model_outputs)
        self._add_value_gradients(model_outputs[:1] if starts is None else starts)
        self.final_gradients = self._add_parameter_gradients()

    def backward(self, instance: int) -> int:
        """Moment of an instance's backward; its forward is moment `instance`."""
        return self.last - instance

    def moments(self) -> list[Moment]:
        """Every moment at its worst."""
        found = []
        gathered = [sums.gathered for sums in self.sums]
        next_backward = [
            num_bytes if instance.reshard_after_forward else 0
            for instance, num_bytes in zip(self.instances, gathered, strict=True)
        ]
        next_gathered, previous_gathered = _before(gathered[::-1])[::-1], _before(next_backward)
        by_layer = [instance.by_layer_bytes for instance in self.instances]
        # Its own, and those of the instance that is next in either direction.
        in_forward = [a + b for a, b in zip(by_layer, _before(by_layer[::-1])[::-1], strict=True)]
        in_backward = [a + b for a, b in zip(by_layer, _before(by_layer), strict=True)]
        unsharded = self.unsharded.totals()
        activations, gradients = self.activations.totals(), self.gradients.totals()
        value_gradients, in_flight = self.value_gradients.totals(), self.in_flight.totals()
        for i, instance in enumerate(self.instances):
            memory, ahead = instance.memory, next_gathered[i]
            coming, again = in_forward[i], in_backward[i]
            here = gathered[i] + self.sums[i].copied + unsharded[i] + coming
            forward = Moment(0, activations[i], here + ahead, 0, memory.forward_peak_bytes)
            found.append(self._with_loss(forward, i, 0, memory.forward_peak_bytes))
            t = self.backward(i)
            here += unsharded[t] - unsharded[i] + again - coming
            behind = previous_gathered[i]
            inside = memory.backward_peak_bytes - memory.saved_bytes + value_gradients[t]
            saved = activations[t] + memory.saved_bytes
            backward = Moment(gradients[t], saved, here + behind, in_flight[t], inside)
            working = inside - value_gradients[t]
            found.append(self._with_loss(backward, i, memory.saved_bytes, working))
            sums = self.sums[i]
            inside = memory.reduction_bytes + value_gradients[t]
            buckets = in_flight[t] + sums.flat + sums.result
            if sums.flat or sums.result:
                behind += unsharded[t] + again
                held = activations[t] - self.done[i]
                reduction = Moment(gradients[t], held, behind, buckets, inside)
                found.append(self._with_loss(reduction, i, 0, memory.reduction_bytes))
        return found

    def _with_loss(self, moment: Moment, instance: int, saved: int, working: int) -> Moment:
        """A moment of `instance`. saved, working: what it holds inside, among activations and
        transient."""
        if instance != self.loss:
            return moment
        activations, transient = moment.activations - saved, moment.transient - working
        return replace(moment, activations=activations, transient=transient, loss=saved + working)

    def _add_saved(self, i: int, instance: InstanceMemory) -> None:
        """What instance i saves inside, between its forward and its backward. Offloaded, it leaves
        while the next instance runs and comes back while that runs backward."""
        saved, until = instance.memory.saved_bytes, self.backward(i) - 1
        if instance.is_offloaded:
            self.activations.add(i + 1, min(i + 1, until), saved)
            self.activations.add(max(i + 2, until), until, saved)
        else:
            self.activations.add(i + 1, until, saved)

    def _add_values(self, model_outputs: Sequence[InstanceOutput]) -> None:
        """Storages of values that leave their instance."""
        until: dict[InstanceOutput, int] = {}
        for i, instance in enumerate(self.instances):
            memory = instance.memory
            for k, source in instance.sources.items():
                root = self._root(source)
                if root is not None:
                    reader = self.backward(i) if k in memory.saved_slots else i
                    until[root] = max(until.get(root, 0), reader)
            for j, saved in enumerate(memory.saved_outputs):
                root = self._root((i, j))
                if saved and root is not None:
                    until[root] = max(until.get(root, 0), self.backward(i))
        for (maker, output), last in until.items():
            if last >= len(self.instances):
                self.saved[maker] += self.instances[maker].memory.output_bytes[output]
        for value in model_outputs:
            root = self._root(value)
            if root is not None:
                until[root] = self.last
        for (maker, output), last in until.items():
            num_bytes = self.instances[maker].memory.output_bytes[output]
            self.activations.add(maker + 1, last, num_bytes)
        self._note_done(until, model_outputs)

    def _note_done(self, until: dict[InstanceOutput, int], kept: Sequence[InstanceOutput]) -> None:
        for i, instance in enumerate(self.instances):
            done = (instance.sources.get(k) for k in instance.memory.done_slots)
            roots = {self._root(source) for source in done}.difference(map(self._root, kept))
            for root in roots:
                if root is not None and until[root] == self.backward(i):
                    self.done[i] += self.instances[root[0]].memory.output_bytes[root[1]]

    def _root(self, value: InstanceOutput | None) -> InstanceOutput | None:
        """The value that owns the storage of `value`; None for a storage from outside."""
        while value is not None:
            instance = self.instances[value[0]]
            root = instance.memory.output_roots[value[1]]
            if root >= 0:
                return value[0], root
            value = instance.sources.get(-1 - root)
        return None

    def _add_value_gradients(self, starts: Sequence[InstanceOutput]) -> None:
        for maker, output in starts:
            size = self.instances[maker].memory.output_bytes[output]
            self.value_gradients.add(self.backward(maker) + 1, self.last, size)
        sources = [instance.sources for instance in self.instances]
        memories = [instance.memory for instance in self.instances]
        for first, last, num_bytes in value_gradients(sources, memories):
            self.value_gradients.add(first, last, num_bytes)

    def _add_parameter_gradients(self) -> int:
        """Gradients that stay, and reduce-scatters that are in flight one region longer. Returns
        the bytes of gradients at the end: a parameter with several uses has one."""
        total = 0
        final: dict[str, int] = {}
        in_buffers: defaultdict[str, list[int]] = defaultdict(list)
        for i in reversed(range(len(self.instances))):
            sums, t = self.sums[i], self.backward(i)
            resident, in_flight = sums.resident, sums.in_flight
            total += sums.resident
            for use in sums.shared:
                # Bucketed uses of one parameter are added up at the end, others at once.
                if use.how != "direct" or use.name not in final:
                    resident += use.resident_bytes
                    in_flight += use.in_flight_bytes
                final[use.name] = use.resident_bytes
                if use.how != "direct" and not use.is_unbucketed:
                    in_buffers[use.name].append(use.resident_bytes)
            self.gradients.add(t + 1, self.last, resident)
            self.in_flight.add(t + 1, min(t + 1, self.last), in_flight)
            self.leaving.add(t + 1, min(t + 1, self.last), sums.leaving)
            self.last_resident = resident
        # What is added up, or put together of slices, is in buffers that other gradients stay in.
        left = sum(sum(sizes) for sizes in in_buffers.values() if len(sizes) > 1)
        left += sum(instance.sliced_bytes for instance in self.instances)
        return total + sum(final.values()) + left

    def sums_of_uses(self) -> list[Moment]:
        """When two gradients of one parameter are added up, those from buckets at the end."""
        num_parts: Counter[tuple[str, bool]] = Counter()
        in_place: dict[str, bool] = {}
        gradients, activations = self.gradients.totals(), self.activations.totals()
        at_end, found = gradients[self.last] + self.last_resident, list[Moment]()
        for i in reversed(range(len(self.instances))):
            own, t = sum(self.instances[i].memory.slot_gradient_bytes), self.backward(i)
            for use in self.sums[i].shared:
                is_direct, size = use.how == "direct", use.resident_bytes
                num_parts[use.name, is_direct] += not use.is_unbucketed
                if is_direct:
                    # The first gradient is there until the last one was added.
                    made = 0 if in_place.setdefault(use.name, use.adds_in_place) else size
                if num_parts[use.name, is_direct] > 1 and is_direct:
                    found.append(Moment(gradients[t], activations[t], 0, 0, own + made))
                elif num_parts[use.name, is_direct] > 1:
                    found.append(Moment(at_end, 0, 0, 0, size))
        return found


def _sums_of(instances: Sequence[InstanceMemory]) -> list[ParameterSums]:
    """The sums of each instance; those with the same objects share one."""
    known: dict[tuple[int, int], ParameterSums] = {}
    found = []
    for instance in instances:
        key = id(instance.memory), id(instance.parameters)
        if key not in known:
            known[key] = ParameterSums(instance.memory, instance.parameters)
        found.append(known[key])
    return found


def _before(gathered: Sequence[int]) -> list[int]:
    """Bytes of the nearest earlier instance that gathers, for each instance."""
    found, nearest = [], 0
    for num_bytes in gathered:
        found.append(nearest)
        nearest = num_bytes or nearest
    return found
