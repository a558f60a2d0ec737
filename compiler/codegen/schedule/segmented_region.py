"""Running a region as its schedule says: one node of autograd's graph, both directions a list of
moves. Of regions in line see meshfold.codegen.chained_chunks.region.

    forward    every piece runs under autograd of its own: what it reads are new leaves
    backward   per piece, torch.autograd.grad from what it made to what it read

Between pieces values and gradients are kept here, each until its last use. A piece's part of
autograd's graph is held by edges, not tensors, so it keeps what its ops saved and nothing else.
Gradients of parameters go to the buckets (meshfold.zero.step), which start their reduction
when the schedule says; of other parameters, and of values, they leave through the region's node.

With full recomputation (meshfold.runtime.recomputation) autograd keeps numbers instead of tensors; when the
first comes back the pieces run again, in the order of the forward, up to the last that is needed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from meshfold.codegen.program.emitted import RegionProgram
from meshfold.codegen.program.region_schedule import Piece, RegionSchedule
from meshfold.distributed.deferred_weight_grads import WeightWork
from meshfold.errors import MeshfoldError
from meshfold.ops.async_autograd import Actions
from meshfold.runtime.recomputation import Recomputation, start_nothing
from meshfold.zero.step import SECOND_BACKWARD, BucketUse, TrainingStep


class ScheduledRegion:
    """One instance of a region during one step. number: its own in the whole program; floats: its
    float arguments; ahead: starts the gathers that come next."""

    def __init__(
        self,
        region: RegionProgram,
        step: TrainingStep,
        instance: int,
        number: int,
        floats: Sequence[float],
        ahead: Callable[[], None],
    ) -> None:
        assert region.schedule is not None
        self.schedule: RegionSchedule = region.schedule
        self.pieces = region.schedule.pieces
        self.region = region
        self.step = step
        self.instance = instance
        self.uses: list[BucketUse] = step.uses[instance]
        self.ahead = ahead
        names = self.pieces.placeholders
        first = len(names) - len(floats)
        self.direct_names = names[first - len(region.direct) : first]
        self.constants: dict[str, Any] = dict(zip(names[first:], floats, strict=True))
        self.constants |= {"mesh": step.mesh, "instance": number}
        self.arguments = region, step, instance, number, floats
        self.values: dict[str, Any] = {}
        """Tensors, none of which autograd follows."""
        self.flying: list[int] = []
        """Numbers of the starts that no wait has come for."""
        self.actions: dict[int, Actions] = {}
        """What a start and its wait do, by number of the start."""
        self.trained: set[str] = set()
        """Names of values with a gradient."""
        self.gradients: dict[str, Tensor] = {}
        self.owned: set[str] = set()
        """Names of those that a W made: tensors that nobody else holds."""
        self.kept: dict[int, _Kept] = {}

    def run(self, direct: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The region's results, ready for backward."""
        tokens = [use.token for use in self.uses if use.token is not None]
        made: tuple[Tensor, ...] = _Node.apply(self, len(tokens), *tokens, *direct)  # type: ignore[no-untyped-call]
        return made

    # Forward.

    def forward(self, direct: Sequence[Tensor]) -> tuple[list[Tensor], list[bool]]:
        """What the region returns, and whether it has gradients."""
        with torch.enable_grad():
            if self.region.recompute == "full":
                recomputation = Recomputation(self.step, self.instance, self._again(), self.uses)
                with recomputation.keeping_numbers(direct):
                    made = self._run_forward(direct)
            else:
                made = self._run_forward(direct)
        return made, [name in self.trained for name in self.pieces.results]

    def _again(self) -> Callable[[Sequence[Tensor]], None]:
        """Runs the pieces a second time, without a word to this object: what autograd keeps of its
        pieces leads here."""
        arguments = self.arguments

        def run(direct: Sequence[Tensor]) -> None:
            again = ScheduledRegion(*arguments, ahead=start_nothing)
            try:
                again._run_forward(direct)
            finally:
                again._finish_collectives()

        return run

    def _finish_collectives(self) -> None:
        """Wait for what is in flight when a second run is stopped."""
        for number in self.flying:
            in_flight = self.values[self.pieces.pieces[number].outputs[0]]
            self.actions[number][0].finish(self.step.mesh, in_flight)

    def _run_forward(self, direct: Sequence[Tensor]) -> list[Tensor]:
        self._enter(dict(zip(self.direct_names, direct, strict=True)))
        for k in range(len(self.schedule.forward)):
            self._move_forward(k)
        results = [self.values[name] for name in self.pieces.results]
        self.values = {}
        return results

    def _enter(self, named: Mapping[str, Tensor]) -> None:
        self.trained = {name for name, x in named.items() if x.requires_grad}
        self.values = {**self.constants, **{name: x.detach() for name, x in named.items()}}

    def _move_forward(self, k: int) -> None:
        move = self.schedule.forward[k]
        match move.kind:
            case "O":
                self._open(move.number)
            case "G":
                self.ahead()
            case "F":
                self._run(move.number)
        for name in self.schedule.dead[k]:
            self.values.pop(name, None)

    def _open(self, bucket: int) -> None:
        use = self.uses[bucket]
        whole = use.members()
        for name, (b, member) in self.pieces.members.items():
            if b == bucket:
                self.values[name] = whole[member]
                if use.token is not None:
                    self.trained.add(name)

    def _run(self, number: int) -> None:
        piece = self.pieces.pieces[number]
        if piece.kind == "ops":
            self._run_ops(number, piece)
            return
        (source, *route), (target,) = piece.inputs, piece.outputs
        mesh, x = self.step.mesh, self.values[source]
        with torch.no_grad():
            if piece.kind == "start":
                self.actions[number] = piece.actions_on(*(self.values[name] for name in route))
                self.values[target] = self.actions[number][0].launch(mesh, x, piece.axis)
                self.flying.append(number)
            else:
                self.values[target] = self.actions[piece.partner][0].finish(mesh, x)
                self.flying.remove(piece.partner)
        if source in self.trained:
            self.trained.add(target)

    def _run_ops(self, number: int, piece: Piece) -> None:
        arguments = [self.values[name] for name in piece.inputs]
        trained = [k for k, name in enumerate(piece.inputs) if name in self.trained]
        if not (trained and torch.is_grad_enabled()):
            self.values.update(zip(piece.outputs, piece.graph.forward(*arguments), strict=True))
            return
        # A leaf of autograd's would hold its tensor; what stands behind an empty one does not.
        anchor = arguments[trained[0]].new_empty(0, requires_grad=True)
        entered = _Entry.apply(anchor, *[arguments[k] for k in trained])  # type: ignore[no-untyped-call]
        for k, x in zip(trained, entered, strict=True):
            arguments[k] = x
        work = WeightWork() if number in self.schedule.late_s else None
        mesh = self.step.mesh
        before, mesh.weight_work = mesh.weight_work, work
        try:
            made = piece.graph.forward(*arguments)
        finally:
            mesh.weight_work = before
        entries = [(piece.inputs[k], _edge(arguments[k])) for k in trained]
        exits = []
        for name, x in zip(piece.outputs, made, strict=True):
            if isinstance(x, Tensor) and x.requires_grad:
                exits.append((name, _edge(x)))
                self.trained.add(name)
                x = x.detach()
            self.values[name] = x
        self.kept[number] = _Kept(entries, exits, work)

    # Backward.

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of what was passed directly; those of buckets are on their way."""
        self.step.arrive(self.instance, prefetches=False)
        for name, gradient in zip(self.pieces.results, gradients, strict=True):
            self._add(name, gradient)
        for k in range(len(self.schedule.backward)):
            self._move_backward(k)
        found = [self.gradients.pop(name, None) for name in self.direct_names]
        assert not self.gradients, f"gradients are made too late: {sorted(self.gradients)}"
        return found

    def _move_backward(self, k: int) -> None:
        move = self.schedule.backward[k]
        match move.kind:
            case "B":
                self._back(move.number)
            case "W":
                self._make_weights(move.number)
            case "R":
                self._reduce(move.number)
            case "G":
                self.step.prefetch_before(self.instance)

    def _add(self, name: str, gradient: Tensor | None) -> None:
        if gradient is not None:
            before = self.gradients.get(name)
            self.gradients[name] = gradient if before is None else before + gradient

    def _back(self, number: int) -> None:
        piece = self.pieces.pieces[number]
        if piece.kind == "ops":
            self._back_ops(number)
            return
        source, (target,) = piece.inputs[0], piece.outputs
        gradient = self.gradients.pop(target, None)
        if gradient is None:
            return
        mesh = self.step.mesh
        if piece.kind == "wait":
            back = self.actions[piece.partner][1]
            self.gradients[source] = back.launch(mesh, gradient, piece.axis)
        else:
            self._add(source, self.actions[number][1].finish(mesh, gradient))

    def _back_ops(self, number: int) -> None:
        kept = self.kept.get(number)
        if kept is None:
            return
        pairs = [(edge, self.gradients.pop(name, None)) for name, edge in kept.exits]
        found = [(edge, gradient) for edge, gradient in pairs if gradient is not None]
        if found:
            self._hand_on(
                kept,
                torch.autograd.grad(
                    [edge for edge, _ in found],
                    [edge for _, edge in kept.entries],
                    [gradient for _, gradient in found],
                    allow_unused=True,
                ),
            )
        if kept.work is None:
            del self.kept[number]

    def _make_weights(self, number: int) -> None:
        kept = self.kept.pop(number, None)
        if kept is None or kept.work is None:
            return
        names = [name for name, _ in kept.entries]
        # Tensors that B's made may be those of others, too.
        before = [self.gradients.pop(n, None) if n in self.owned else None for n in names]
        made = kept.work.gradients([edge for _, edge in kept.entries], before)
        for name, gradient in zip(names, made, strict=True):
            self._add(name, gradient)
            if gradient is not None:
                self.owned.add(name)

    def _hand_on(self, kept: "_Kept", gradients: Sequence[Tensor | None]) -> None:
        for (name, _), gradient in zip(kept.entries, gradients, strict=True):
            self._add(name, gradient)

    def _reduce(self, bucket: int) -> None:
        use = self.uses[bucket]
        if use.token is None:
            return
        found: list[Tensor | None] = [None] * len(use.bucket.members)
        for name, (b, member) in self.pieces.members.items():
            if b == bucket:
                found[member] = self.gradients.pop(name, None)
        use.start_reduction(found)


@dataclass(frozen=True, slots=True)
class _Kept:
    """Where a piece begins and ends in autograd's graph, by names of values; what its B leaves."""

    entries: Sequence[tuple[str, GradientEdge]]
    exits: Sequence[tuple[str, GradientEdge]]
    work: WeightWork | None


def _edge(x: Tensor) -> GradientEdge:
    """As get_gradient_edge of what is no leaf, without its checks."""
    return GradientEdge(x.grad_fn, x.output_nr)  # type: ignore[arg-type]


class _Entry(torch.autograd.Function):
    """The same tensors, at a new place of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        raise AssertionError("gradients are taken where a piece begins")


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, region: ScheduledRegion, num_tokens: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.region = region
        ctx.set_materialize_grads(False)
        made, trained = region.forward(tensors[num_tokens:])
        # New tensors: autograd writes itself into what is returned.
        results = tuple(x.detach() for x in made)
        pairs = zip(results, trained, strict=True)
        ctx.mark_non_differentiable(*(x for x, is_trained in pairs if not is_trained))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        region, ctx.region = ctx.region, None
        if region is None:
            raise MeshfoldError(SECOND_BACKWARD)
        direct = region.backward(gradients)
        tokens = [use.shards[0].new_empty(0) for use in region.uses if use.token is not None]
        return None, None, *tokens, *direct
