"""The peak memory of a device with microbatches, stages, or both, from the passes that it runs.

Each kind of pass is run once on its events, as for its seconds (passes.py), with what the stage has
outside of the instance that runs (cost_models/memory/stage_residents.py). Over the actions of the
device there are besides

    of every microbatch between F and B what its stage keeps; from B to W what is put off
    gradients that are added up, from the first B of a stage on
    parameters that are gathered once per step, all the time: they may be there before the first F
    the message for the next action, whose receive is posted before this one starts
    a gradient that was sent, until the next message leaves
    outputs beside the loss, until the end of the step

and at the end of the step there are all gradients and what the optimizer allocates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from meshfold.cost_models.memory.stage_residents import StageResidents
from meshfold.cost_models.memory.step_memory import Moment
from meshfold.cost_models.pipeline.actions import Pass, StageAction
from meshfold.cost_models.simulation.pipeline import StageEvents
from meshfold.cost_models.simulation.step import StepRun
from meshfold.ir.step_events import StepEvents


@dataclass(frozen=True)
class StageUse:
    """What a stage is besides its events. messages: bytes that come from other devices for F and
    for B; sends_back: of gradients for the stage before. outputs: of a microbatch, that stay to the
    end of the step. loss: the instance that computes the loss, -1 for none.
    largest_gradient_bytes: of those that go straight to .grad, and are copied there one by one;
    reduced_bytes: of the buffers that gradients are reduced in with every microbatch, at most in
    flight."""

    residents: StageResidents
    messages: Mapping[Pass, int]
    sends_back: int = 0
    outputs: int = 0
    loss: int = -1
    largest_gradient_bytes: int = 0
    reduced_bytes: int = 0


@dataclass(frozen=True)
class StageMemory:
    """The worst moments of the passes of a stage, with what it has of their microbatch, and in a
    backward of gradients. gathered: parameters that are gathered once, part of the first forward
    and of the last backward."""

    use: StageUse
    first_forward: Moment
    forward: Moment
    first_backward: Moment
    backward: Moment
    last_backward: Moment
    gathered: int


class _PassRun(StepRun):
    """Notes the worst moment of each direction. gradients: of parameters, in the backward."""

    def __init__(self, events: StepEvents, use: StageUse, gradients: Sequence[int]) -> None:
        super().__init__(events, releases_all=True)
        self.use = use
        self.gradients = gradients
        self.worst = Moment()

    def _record(self, moment: int, inside_bytes: int, buckets_bytes: int) -> None:
        residents, count = self.use.residents, len(self.regions)
        activations = residents.activations[moment]
        gradients = self.gradients[moment] if moment >= count else 0
        known = activations + gradients + inside_bytes + self.unsharded_bytes + buckets_bytes
        if known <= self.worst.total:
            return
        i = moment if moment < count else 2 * count - 1 - moment
        loss = saved = 0
        if i == self.use.loss:
            loss = inside_bytes
        elif moment >= count:
            saved = min(residents.saved[i], inside_bytes)
        self.worst = Moment(
            gradients=gradients,
            activations=activations + saved,
            gathered=self.unsharded_bytes,
            buckets=buckets_bytes,
            transient=inside_bytes - saved - loss,
            loss=loss,
        )

    def passes(self) -> tuple[Moment, int, Moment]:
        """Of the forward, bytes that are gathered behind it, and of the backward."""
        self.forward()
        forward, gathered = self.worst, self.unsharded_bytes
        self.worst = Moment()
        self.backward()
        return forward, gathered, self.worst


def stage_memory(
    events: StageEvents, first: StepEvents, use: StageUse, *, splits: bool = False
) -> StageMemory:
    """The passes of a stage. first: events around the first backward; splits: whether what B makes
    of gradients of parameters waits for W."""
    of = use.residents.gradients
    if splits:
        events = replace(events, edge=_unreduced(events.edge), inner=_unreduced(events.inner))
        first = events.inner
    first_forward, gathered, last = _PassRun(events.edge, use, of.last).passes()
    forward, _, later = _PassRun(events.inner, use, of.later).passes()
    _, _, begun = _PassRun(first, use, of.first).passes()
    return StageMemory(use, first_forward, forward, begun, later, last, gathered)


def _unreduced(events: StepEvents) -> StepEvents:
    regions = tuple(
        replace(of, backward=tuple(e for e in of.backward if e.kind != "reduce"))
        for of in events.regions
    )
    return replace(events, regions=regions, reduce_buckets=())


def device_peak(
    actions: Sequence[StageAction], stages: Mapping[int, StageMemory], update_bytes: int
) -> Moment:
    """The worst moment of a device. stages: of this device; update_bytes: what the optimizer
    allocates for itself."""
    device = _Device(actions, stages)
    for k in range(len(actions)):
        device.run(k)
    gradients = sum(of.use.residents.gradients.final for of in stages.values())
    device.note(Moment(gradients, device.outputs, transient=update_bytes))
    return device.worst


class _Device:
    """Memory over the actions. gathered: of parameters that stay; kept, gradients: by stage;
    left, left_weights: how many B and how many W each stage has still to run."""

    def __init__(self, actions: Sequence[StageAction], stages: Mapping[int, StageMemory]) -> None:
        self.actions = actions
        self.stages = stages
        self.gathered = sum(of.gathered for of in stages.values())
        self.kept = dict.fromkeys(stages, 0)
        self.gradients = dict.fromkeys(stages, 0)
        self.begun: set[tuple[int, Pass]] = set()
        kinds = [(a.stage, a.kind) for a in actions]
        self.left, self.left_weights = (
            {s: kinds.count((s, kind)) for s in stages}
            for kind in (Pass.BACKWARD, Pass.WEIGHT_GRADIENT)
        )
        self.splits = any(kind is Pass.WEIGHT_GRADIENT for _, kind in kinds)
        self.sent = self.outputs = 0
        self.worst = Moment()

    def run(self, k: int) -> None:
        action = self.actions[k]
        coming = 0
        if k + 1 < len(self.actions):
            then = self.actions[k + 1]
            coming = self.stages[then.stage].use.messages.get(then.kind, 0)
        match action.kind:
            case Pass.FORWARD:
                self._forward(action, coming)
            case Pass.BACKWARD:
                self._backward(action, coming)
            case Pass.WEIGHT_GRADIENT:
                self._weight_gradients(action, coming)
        self.begun.add((action.stage, action.kind))

    def note(self, moment: Moment) -> None:
        if moment.total > self.worst.total:
            self.worst = moment

    def _forward(self, action: StageAction, coming: int) -> None:
        s, of = action.stage, self.stages[action.stage]
        is_first = (s, Pass.FORWARD) not in self.begun
        gradients = sum(self.gradients.values())
        self.outputs += of.use.outputs
        self._note_beside(of.first_forward if is_first else of.forward, of, gradients, coming)
        self.kept[s] += of.use.residents.kept
        if of.use.messages[Pass.BACKWARD]:
            self.sent = 0  # what the stage sends is among what it keeps

    def _backward(self, action: StageAction, coming: int) -> None:
        s, of = action.stage, self.stages[action.stage]
        residents = of.use.residents
        is_first = (s, Pass.BACKWARD) not in self.begun
        self.left[s] -= 1
        self.kept[s] -= residents.kept
        pass_ = of.first_backward if is_first else of.backward
        if not self.left[s]:
            pass_ = of.last_backward
        gradients = sum(self.gradients.values())
        if not self.splits:
            gradients -= self.gradients[s]  # they are in the pass
        self._note_beside(pass_, of, gradients, coming)
        self.kept[s] += residents.put_off_bytes
        if not self.splits:
            parameters = residents.gradients
            self.gradients[s] = parameters.summed if self.left[s] else parameters.final
        self.sent = of.use.sends_back

    def _weight_gradients(self, action: StageAction, coming: int) -> None:
        """Products one after the other. Gradients that go straight to .grad go there behind their
        product, others behind the last of their instance: results of reductions, and in the first W
        what is added up later, count from the first of these on."""
        s, of = action.stage, self.stages[action.stage]
        self.left_weights[s] -= 1
        gradients, before = of.use.residents.gradients, self.gradients[s]
        others = sum(self.gradients.values()) - before
        buffers, of_results = of.use.reduced_bytes, gradients.beside
        if not before:
            of_results = gradients.each + gradients.sums
        if not self.left_weights[s]:
            of_results += gradients.late
        results = direct = 0
        for left in of.use.residents.put_off:
            for part in left.parts:
                now = before + results + direct
                self._note_beside(Moment(now, transient=part.most), of, others, coming)
                self.kept[s] -= part.freed
                results = results if left.goes_alone else of_results
                now = before + results + direct
                leaving = part.behind + of.use.largest_gradient_bytes
                adding = Moment(now, buckets=buffers, transient=leaving)
                self._note_beside(adding, of, others, coming)
                if not before:
                    direct += part.made if left.goes_alone else left.direct
        self.gradients[s] = gradients.summed if self.left_weights[s] else gradients.final

    def _note_beside(self, pass_: Moment, of: StageMemory, gradients: int, coming: int) -> None:
        """A pass of a stage, beside what else the device has."""
        is_edge = pass_ is of.first_forward or pass_ is of.last_backward
        waiting = sum(self.kept.values()) + self.outputs + self.sent + coming
        self.note(
            replace(
                pass_,
                gradients=pass_.gradients + gradients,
                activations=pass_.activations + waiting,
                gathered=pass_.gathered + self.gathered - (of.gathered if is_edge else 0),
            )
        )
