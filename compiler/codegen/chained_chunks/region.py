"""Regions in line: what one hands on in parts the next takes as it comes.

Autograd sees an empty tensor in place of such a value (meshfold.handed_parts), which carries the
order of regions and no more; parts, and their gradients, go from a region to its neighbour by
number. The last moves of a region, its tail, run within the next one: at the moves T of its
schedule, or as soon as that asks for a part that is not there yet. The tail is over when the region
that runs it is, and before that starts gathers ahead: two regions are whole at most, as without.
Backward the same, from the last region to the first.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshfold.codegen.program.emitted import RegionProgram
from meshfold.codegen.schedule.segmented_region import ScheduledRegion
from meshfold.handed_parts import Borders
from meshfold.zero.step import TrainingStep


class LineRegion(ScheduledRegion):
    """See ScheduledRegion. borders: what comes, and leaves, in parts; before: the instance before,
    where anything comes."""

    def __init__(
        self,
        region: RegionProgram,
        step: TrainingStep,
        instance: int,
        number: int,
        floats: Sequence[float],
        ahead: Callable[[], None],
        borders: Borders,
        before: "LineRegion | None",
    ) -> None:
        super().__init__(region, step, instance, number, floats, ahead)
        schedule = self.schedule
        self.before = before
        self.behind: LineRegion | None = None
        """The next instance, in the backward."""
        self.idle = borders.idle(schedule)
        taken = borders.taken_names(schedule)
        self.taken = {name: number for number, name in enumerate(taken)}
        """Names of the parts that come, with their numbers; handed: of those that leave."""
        self.handed = {name: k for k, name in enumerate(borders.handed_names(schedule))}
        self.come = {n for n, slot in enumerate(region.direct) if slot in borders.slots}
        self.leave = frozenset(borders.handed)
        """Of what is passed directly, and of the results, those in parts."""
        self.parts: dict[int, tuple[Tensor, bool]] = {}
        """Parts by number, and whether they have a gradient, until they are taken."""
        self.left = set(self.handed)
        """Names of parts whose gradients have not come."""
        self.forward_at = schedule.forward_end(borders.handed)
        self.backward_at = schedule.backward_end(borders.slots)
        """Of the moves, the first that the next region runs."""
        self.is_released = False

    # Forward.

    def forward(self, direct: Sequence[Tensor]) -> tuple[list[Tensor], list[bool]]:
        made, trained = super().forward(direct)
        # The empty tensor is followed in any case.
        return made, [n in self.leave or t for n, t in enumerate(trained)]

    def _run_forward(self, direct: Sequence[Tensor]) -> list[Tensor]:
        pairs = enumerate(zip(self.direct_names, direct, strict=True))
        self._enter(dict(pair for n, pair in pairs if n not in self.come))
        if not all(direct[n].requires_grad for n in self.come):
            # The backward ends here: nobody would run the tail.
            self.backward_at = len(self.schedule.backward)
        for k in range(self.forward_at):
            self._move_forward(k)
        if self.before is not None:
            self.before.finish_forward()
        results = [
            torch.empty(0, device=self.step.mesh.device) if n in self.leave else self.values[name]
            for n, name in enumerate(self.pieces.results)
        ]
        self._end_forward()
        return results

    def _move_forward(self, k: int) -> None:
        kind = self.schedule.forward[k].kind
        if self.before is not None and kind == "T":
            self.before.advance_forward()
        if self.before is not None and kind == "G":
            self.before.finish_forward()
        super()._move_forward(k)

    def advance_forward(self) -> None:
        """The next move of the tail, if one is left."""
        if self.forward_at < len(self.schedule.forward):
            self.forward_at += 1
            self._move_forward(self.forward_at - 1)
            self._end_forward()

    def finish_forward(self) -> None:
        """All of the tail."""
        while self.forward_at < len(self.schedule.forward):
            self.advance_forward()

    def release(self) -> None:
        """X, once the forward is over."""
        self.is_released = True
        self._end_forward()

    def _end_forward(self) -> None:
        if self.forward_at == len(self.schedule.forward):
            self.values = {}
            if self.is_released:
                self.step.release(self.instance)

    def _run(self, number: int) -> None:
        if number in self.idle:
            return
        piece = self.pieces.pieces[number]
        for name in piece.inputs:
            if name in self.taken and name not in self.values:
                assert self.before is not None, "what comes in parts has a region before"
                self.values[name], is_trained = self.before.hand(self.taken[name])
                self.trained |= {name} if is_trained else set()
        super()._run(number)
        for name in piece.outputs:
            if name in self.handed:
                self.parts[self.handed[name]] = self.values[name], name in self.trained

    def hand(self, number: int) -> tuple[Tensor, bool]:
        """A part, and whether it has a gradient, as soon as it is there."""
        while number not in self.parts:
            assert self.forward_at < len(self.schedule.forward), f"part {number} is not made"
            self.advance_forward()
        return self.parts.pop(number)

    # Backward.

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        is_begun = self.behind is not None and not self.behind.is_over
        self.step.arrive(self.instance, prefetches=False, is_begun=is_begun)
        for n, (name, gradient) in enumerate(zip(self.pieces.results, gradients, strict=True)):
            if n not in self.leave:
                self._add(name, gradient)
        for k in range(self.backward_at):
            self._move_backward(k)
        self._finish_behind()
        for name in sorted(self.left):
            self._take_gradient(name)
        self.behind = None
        if self.before is not None:
            self.before.behind, self.before = self, None
        token = torch.empty(0, device=self.step.mesh.device)
        found = [
            token if n in self.come else self.gradients.pop(name, None)
            for n, name in enumerate(self.direct_names)
        ]
        self._check_over()
        return found

    def _move_backward(self, k: int) -> None:
        kind = self.schedule.backward[k].kind
        if self.behind is not None and kind == "T":
            self.behind.advance_backward()
        if kind == "G":
            self._finish_behind()
        super()._move_backward(k)

    @property
    def is_over(self) -> bool:
        """Whether the backward has run to its end."""
        return self.backward_at == len(self.schedule.backward)

    def advance_backward(self) -> None:
        """The next move of the tail, if one is left."""
        if not self.is_over:
            self.backward_at += 1
            self._move_backward(self.backward_at - 1)
            if self.is_over:
                self._check_over()
                self.step.leave_instance()

    def _check_over(self) -> None:
        """Of a backward that is over only gradients of parts that came are left."""
        assert not self.is_over or self.taken.keys() >= self.gradients.keys(), (
            f"gradients are made too late: {sorted(self.gradients)}"
        )

    def _finish_behind(self) -> None:
        while self.behind is not None and not self.behind.is_over:
            self.behind.advance_backward()

    def _back(self, number: int) -> None:
        if number in self.idle:
            return
        for name in self.pieces.pieces[number].outputs:
            if name in self.left:
                self._take_gradient(name)
        super()._back(number)

    def _take_gradient(self, name: str) -> None:
        self.left.remove(name)
        if self.behind is not None:
            self._add(name, self.behind.hand_gradient(self.handed[name]))

    def hand_gradient(self, number: int) -> Tensor | None:
        """Of a part that came, as soon as nothing more is added to it."""
        name = next(name for name, n in self.taken.items() if n == number)
        while self.backward_at <= self.schedule.last_readers.get(name, -1):
            self.advance_backward()
        return self.gradients.pop(name, None)
