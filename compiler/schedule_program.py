"""Scheduling an emitted program: per region the order of its pieces (meshfold.codegen.program.region_schedule).

Costs are the plan's, so they are the same on all ranks.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import fx

from meshfold.codegen.program.emitted import ORIGIN, PLACE, EmittedProgram, RegionProgram
from meshfold.codegen.program.region_schedule import Collective, Move, Piece, RegionSchedule
from meshfold.codegen.schedule.segment_costs import PiecePrices
from meshfold.codegen.schedule.segments import Cuts, cut_in_pieces, cut_in_runs
from meshfold.codegen.schedule.split_backward import late_names, split_backward, weight_of
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.handed_parts import borders_of, communicates, is_in_parts
from meshfold.ir.op_graph import OpGraph, SlotKind
from meshfold.passes.chained_chunks.boundary_values import joined, taken_apart
from meshfold.passes.chained_chunks.software_pipeline import NEXT, Border, LineOrders, line_order
from meshfold.passes.planner.check import typed_rules
from meshfold.passes.region.parameter_tables import local_bytes
from meshfold.passes.schedule.list_schedule import Task, list_order
from meshfold.piece_runs import moves_of, period_of, renumbered, runs_of
from meshfold.zero.parameter_group import Bucket

Moves = tuple[tuple[Move, ...], int]
"""Those of a direction, and how many are its tail."""

GRAIN = 1 / 12
"""Of the longest collective, of a region in line: pieces are not cut shorter. Fitted to Llama-3-8B
with tp8+sp: with a half a layer's forward takes 2.60 ms, with this 2.37, and no less with shorter
ones."""


def scheduled(
    program: EmittedProgram, costs: CostModel, bound_bytes: int, known: LineOrders | None = None
) -> EmittedProgram:
    """`program` with a schedule for every region that communicates inside; what gathers and reduces
    its parameters alone does that in eager mode just so. bound_bytes: what may be held for W's;
    known: orders of lines that were found before.
    """
    known = {} if known is None else known
    regions = []
    lines = _lines(program)
    pairs = zip(program.regions, region_prices(program, costs), strict=True)
    for k, (region, prices) in enumerate(pairs):
        if communicates(region):
            schedule = schedule_region(region, prices, bound_bytes, lines.get(k), known)
            region = replace(region, schedule=schedule)
        regions.append(region)
    return replace(program, regions=tuple(regions))


def _lines(program: EmittedProgram) -> dict[int, Mapping[int, int]]:
    """Per region in parts, by number, the slots that it takes in parts from its like, and which
    output each is; nothing where none of its instances follows another."""
    found: dict[int, Mapping[int, int]] = {
        k: {} for k, region in enumerate(program.regions) if is_in_parts(program, region)
    }
    for k, borders in enumerate(borders_of(program)):
        if borders.taken and program.programs[k] == program.programs[k - 1]:
            found[program.programs[k]] = dict(borders.taken)
    return found


def region_prices(program: EmittedProgram, costs: CostModel) -> Iterator[PiecePrices]:
    """Per region of `program` what its pieces cost."""
    for region in program.regions:
        rules = typed_rules(region.ops, region.typing, region.name, costs.mesh)
        yield PiecePrices(region.ops, rules, costs)


def schedule_region(
    region: RegionProgram,
    prices: PiecePrices,
    bound_bytes: int,
    line: Mapping[int, int] | None,
    known: LineOrders,
) -> RegionSchedule:
    """The schedule of an emitted region. bound_bytes: what may be held for W's; line: what it takes
    in parts from its like, None of one that does not run in parts. One in line has the pieces with
    which the line is faster."""
    schedulers = [_Scheduler(region, prices, bound_bytes, line, known)]
    if line:
        schedulers.append(_Scheduler(region, prices, bound_bytes, line, known, grain=GRAIN))
    found = [(one.schedule(), one.seconds) for one in schedulers]
    return min(found, key=lambda pair: pair[1])[0]


class _Scheduler:
    def __init__(
        self,
        region: RegionProgram,
        prices: PiecePrices,
        bound_bytes: int,
        line: Mapping[int, int] | None,
        known: LineOrders,
        grain: float = math.inf,
    ) -> None:
        self.known = known
        self.prices = prices
        self.ops: OpGraph = prices.ops
        self.costs = prices.costs
        self.region = region
        self.buckets = region.buckets
        self.bound_bytes = bound_bytes
        self.line = line or {}
        self.grain = grain
        self.seconds = 0.0
        """Of regions in line, both directions, as LineOrder has them."""
        in_parts = line is not None
        taken = taken_apart(self.ops, region.typing) if in_parts else {}
        handed = joined(self.ops, region.typing) if in_parts else {}
        apart = [cut.ops for cut in (*taken.values(), *handed.values())]
        self.cuts = self._cuts(apart) if in_parts else Cuts()
        self.pieces = cut_in_pieces(region.graph.graph, self.cuts)
        self.taken = {v: self._piece_of(cut.ops) for v, cut in taken.items()}
        self.handed = {n: self._piece_of(cut.ops) for n, cut in handed.items()}
        self.makers = self.pieces.makers()
        self.late: dict[int, tuple[float, int]] = {}
        """Per piece with a W its seconds and the bytes held for it."""

    def schedule(self) -> RegionSchedule:
        collectives = [p for p in self.pieces.pieces if p.kind != "ops"]
        if any(self.prices.conversion(piece, 1)[1] for piece in collectives):
            self._split_weights()
        forward, backward = self._forward(), self._backward()
        if self.line:
            forward, backward = self._in_runs(forward, backward)
        (forward_moves, forward_tail), (backward_moves, backward_tail) = forward, backward
        return RegionSchedule(
            self.pieces,
            {k: seconds for k, (seconds, _) in self.late.items()},
            {k: held_bytes for k, (_, held_bytes) in self.late.items()},
            forward_moves,
            backward_moves,
            self.taken,
            self.handed,
            self.line,
            forward_tail,
            backward_tail,
        )

    def _cuts(self, apart: Sequence[frozenset[int]]) -> Cuts:
        """With a grain pieces are shorter, so that a part that has come is soon sent on."""
        seconds = tuple(time.forward_s for time in self.prices.op_times)
        whole = cut_in_pieces(self.region.graph.graph).pieces
        transfers = [self.prices.conversion(p, 0)[1] for p in whole if p.kind == "start"]
        longest_s = max((t.seconds for t in transfers if t is not None), default=math.inf)
        return Cuts(tuple(apart), seconds, self.grain * longest_s)

    def _in_runs(self, forward: Moves, backward: Moves) -> tuple[Moves, Moves]:
        """The same with pieces that stay together as one."""
        periods = period_of(*forward), period_of(*backward)
        apart = {*self.taken.values(), *self.handed.values()}
        runs = runs_of(self.pieces, *periods, apart)
        self.pieces, numbers = cut_in_runs(self.region.graph.graph, self.cuts, runs)
        self.taken = {v: numbers[k] for v, k in self.taken.items()}
        self.handed = {n: numbers[k] for n, k in self.handed.items()}
        if self.late:
            self.late = {}
            self._split_weights()
        there, back = (moves_of(renumbered(period, numbers)) for period in periods)
        return there, back

    def _piece_of(self, ops: frozenset[int]) -> int:
        pieces = enumerate(self.pieces.pieces)
        return next(k for k, p in pieces if p.kind == "ops" and not ops.isdisjoint(p.origins))

    def _split_weights(self) -> None:
        made: set[int] = set()
        """Weights that a W before has made a gradient of."""
        for k, piece in reversed(tuple(enumerate(self.pieces.pieces))):
            products = split_backward(piece.graph, self.ops) if piece.kind == "ops" else []
            if not products:
                continue
            # Of a product's backward half makes the gradient of its weight.
            seconds = sum(self.prices.op_times[n.meta[ORIGIN]].backward_s / 2 for n in products)
            for weight in (weight_of(n).meta[PLACE] for n in products):
                seconds += self.prices.added_s(*weight) if weight[0] in made else 0.0
                made.add(weight[0])
            self.late[k] = seconds, sum(map(self._held_bytes, products))

    def _held_bytes(self, product: fx.Node) -> int:
        """What a product's W reads: its input, and the gradient of its result."""
        nodes = [product, *product.all_input_nodes]
        activations = [n for n in nodes if PLACE in n.meta and not self._is_parameter(n)]
        return sum(self._bytes(n) for n in activations)

    def _is_parameter(self, node: fx.Node) -> bool:
        v, _ = node.meta[PLACE]
        return v < len(self.ops.slots) and self.ops.slots[v].kind is SlotKind.PARAMETER

    def _bytes(self, node: fx.Node) -> int:
        v, layout = node.meta[PLACE]
        return local_bytes(self.ops.values[v], layout, self.costs.mesh.sizes)

    # Forward.

    def _forward(self) -> Moves:
        """The moves, and how many of them are its tail."""
        moves: list[Move] = []
        tasks: list[Task] = []
        at: dict[int, int] = {}
        opened: dict[int, int] = {}
        for k, piece in enumerate(self.pieces.pieces):
            for b in self._read_buckets(piece):
                if b not in opened:
                    opened[b] = len(tasks)
                    moves.append(Move("O", b))
                    copies = self.prices.copies(self.buckets[b])
                    tasks.append(Task(seconds=copies.packed_s + copies.taken_s))
            needs = {at[self.makers[name]] for name in piece.inputs if name in self.makers}
            needs |= {opened[b] for b in self._read_buckets(piece)}
            at[k] = len(tasks)
            moves.append(Move("F", k))
            tasks.append(self._task(piece, 0, tuple(sorted(needs)), at))
        opens = set(opened.values())
        made = [t for b, t in opened.items() if self.buckets[b].is_made]
        if made:
            # Not before its own have come: three regions would be whole, one of them in flight.
            moves.append(Move("G"))
            tasks.append(self._ahead(made[:1]))
        names = [
            name for n, name in enumerate(self.pieces.results) if n not in self._line_outputs()
        ]
        early = {at[self.makers[name]] for name in names if name in self.makers}
        handed = [
            (at[self.makers[theirs]], at[k])
            for theirs, own in self._line_names()
            for k, piece in enumerate(self.pieces.pieces)
            if own in piece.inputs
        ]
        ahead = len(tasks) - 1 if made else -1
        border = Border(tuple(handed), frozenset(early | opens), ahead, made[0] if made else -1)
        return self._ordered(moves, tasks, at, border)

    def _line_outputs(self) -> set[int]:
        return set(self.line.values())

    def _line_names(self) -> Iterator[tuple[str, str]]:
        """Per part that equal regions in line hand on its names in the one and in the next."""
        for v, n in self.line.items():
            handed, taken = (self.pieces.pieces[k] for k in (self.handed[n], self.taken[v]))
            yield from zip(handed.inputs[1:], taken.outputs, strict=True)

    def _ordered(
        self, moves: Sequence[Move], tasks: list[Task], at: Mapping[int, int], border: Border
    ) -> Moves:
        """The moves of a direction as they are run, and how many of them are its tail."""
        if not self.line:
            return tuple(moves[t] for t in list_order(tasks, self.bound_bytes)), 0
        for k in (
            *(self.taken[v] for v in self.line),
            *(self.handed[n] for n in self._line_outputs()),
        ):
            # It does not run between them.
            tasks[at[k]] = replace(tasks[at[k]], seconds=0.0)
        found = line_order(tasks, border, self.bound_bytes, self.known)
        self.seconds += found.seconds
        order = (Move("T") if t == NEXT else moves[t] for t in found.order)
        return tuple(order), found.tail

    def _read_buckets(self, piece: Piece | Collective) -> list[int]:
        """Buckets that a piece reads members of."""
        members = self.pieces.members
        return sorted({members[name][0] for name in piece.inputs if name in members})

    # Backward.

    def _backward(self) -> Moves:
        moves, tasks = [Move("A")], [Task(seconds=self._regathered_s())]
        at: dict[int, int] = {}
        last: dict[int, int] = {}
        """What makes the gradients of a piece's inputs, the last of it."""
        users, late = self._users(), self._late_users()
        for k in reversed(range(len(self.pieces.pieces))):
            piece = self.pieces.pieces[k]
            needs = {0, *(at[u] for u in users[k]), *(last[u] for u in late[k])}
            last[k] = at[k] = len(tasks)
            moves.append(Move("B", k))
            tasks.append(self._task(piece, 1, tuple(sorted(needs)), at))
            if k in self.late:
                seconds, held_bytes = self.late[k]
                tasks[-1] = replace(tasks[-1], seconds=max(0.0, tasks[-1].seconds - seconds))
                last[k] = len(tasks)
                moves.append(Move("W", k))
                tasks.append(Task((at[k],), seconds, held_bytes=held_bytes))
        for b, bucket in enumerate(self.buckets):
            if bucket.requires_grad:
                read = [k for k, p in enumerate(self.pieces.pieces) if b in self._read_buckets(p)]
                moves.append(Move("R", b))
                tasks.append(self._reduction(bucket, tuple(sorted({0, *(last[k] for k in read)}))))
        is_ahead = any(b.is_made for b in self.buckets) and not self.region.keeps_gathered
        if is_ahead:
            moves.append(Move("G"))
            tasks.append(self._ahead([0]))
        early = {
            0,
            *(last[k] for k in self._direct_readers()),
            *(at[k] for k in self._direct_readers()),
        }
        handed = [
            (t, at[self.makers[theirs]])
            for theirs, own in self._line_names()
            for k, piece in enumerate(self.pieces.pieces)
            if own in piece.inputs
            for t in dict.fromkeys((at[k], last[k]))
        ]
        border = Border(tuple(handed), frozenset(early), len(tasks) - 1 if is_ahead else -1, 0)
        return self._ordered(moves, tasks, at, border)

    def _regathered_s(self) -> float:
        """Copies around what is gathered, or cast, once more."""
        made = [b for b in self.buckets if b.is_made and not self.region.keeps_gathered]
        return sum(c.packed_s + c.taken_s for c in map(self.prices.copies, made))

    def _direct_readers(self) -> set[int]:
        """Pieces with gradients of what is passed directly and not in parts: these leave with the
        region's own."""
        names = zip(self.region.direct, self.region.direct_names, strict=True)
        trained = {
            name for v, name in names if v not in self.line and self.ops.values[v].requires_grad
        }
        pieces = enumerate(self.pieces.pieces)
        return {k for k, piece in pieces if not trained.isdisjoint(piece.inputs)}

    def _users(self) -> list[set[int]]:
        """Per piece those that read what it makes."""
        return self._readers(lambda piece: piece.inputs)

    def _late_users(self) -> list[set[int]]:
        """Per piece those whose W makes gradients of what it makes: of a weight that is converted,
        or a view."""
        return self._readers(late_names)

    def _readers(self, names: Callable[[Piece | Collective], Iterable[str]]) -> list[set[int]]:
        users: list[set[int]] = [set() for _ in self.pieces.pieces]
        for k, piece in enumerate(self.pieces.pieces):
            for name in names(piece):
                if name in self.makers:
                    users[self.makers[name]].add(k)
        return users

    # Tasks.

    def _task(
        self,
        piece: Piece | Collective,
        direction: int,
        needs: tuple[int, ...],
        at: Mapping[int, int],
    ) -> Task:
        """A piece forward (0) or backward (1)."""
        if piece.kind == "ops":
            return Task(needs, self.prices.seconds(self.pieces, piece, direction))
        seconds, transfer, _ = self.prices.conversion(piece, direction)
        if (piece.kind == "start") == (direction == 0):
            if transfer is None:
                return Task(needs, seconds)
            return Task(needs, seconds, transfer.link, transfer.seconds)
        if transfer is None:
            return Task(needs)
        other = piece.partner if direction == 0 else self._wait_of(piece)
        return Task(needs, seconds, start=at[other])

    def _wait_of(self, start: Collective) -> int:
        waits = enumerate(self.pieces.pieces)
        return next(k for k, p in waits if p.kind == "wait" and p.inputs == start.outputs)

    def _ahead(self, needs: Sequence[int]) -> Task:
        """The gathers of the region that comes next, which are taken to be as long as its own."""
        made = [b for b in self.buckets if b.gather]
        if not made:
            return Task(tuple(needs))
        seconds = sum(self.prices.bucket_s("all_gather", b, b.gather) for b in made)
        axes = max((b.gather for b in made), key=len)
        link = self.costs.group_link(axes).name
        return Task(tuple(needs), 0.0, link, seconds, floats=True, is_due=True)

    def _reduction(self, bucket: Bucket, needs: tuple[int, ...]) -> Task:
        axes = bucket.gather or bucket.reduce
        copied_s = self.prices.copies(bucket).reduced_s
        if not axes:
            return Task(needs, copied_s)
        kind = "reduce_scatter" if bucket.gather else "all_reduce"
        seconds = self.prices.bucket_s(kind, bucket, axes)
        return Task(needs, copied_s, self.costs.group_link(axes).name, seconds, floats=True)
