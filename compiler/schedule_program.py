"""Scheduling an emitted program: per region the order of its pieces (meshfold.region_schedule).

Costs are the plan's, so they are the same on all ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import fx

from meshfold.buckets import Bucket
from meshfold.convert_ops import STARTS
from meshfold.cost_models.cost_model import CostModel
from meshfold.opgraph import OpGraph, SlotKind
from meshfold.passes.check_plan import typed_rules
from meshfold.passes.list_schedule import Task, list_order
from meshfold.passes.parameter_prices import local_bytes
from meshfold.piece_prices import PiecePrices
from meshfold.pieces import cut_in_pieces
from meshfold.program import ORIGIN, PLACE, EmittedProgram, RegionProgram
from meshfold.region_schedule import Collective, Move, Piece, RegionSchedule
from meshfold.weight_gradients import split_backward, weight_of


def scheduled(program: EmittedProgram, costs: CostModel, bound_bytes: int) -> EmittedProgram:
    """`program` with a schedule for every region that communicates inside; what gathers and reduces
    its parameters alone does that in eager mode just so. bound_bytes: what may be held for W's.
    """
    regions = []
    for region, prices in zip(program.regions, region_prices(program, costs), strict=True):
        if any(n.target in STARTS for n in region.graph.graph.nodes):
            region = replace(region, schedule=schedule_region(region, prices, bound_bytes))
        regions.append(region)
    return replace(program, regions=tuple(regions))


def region_prices(program: EmittedProgram, costs: CostModel) -> Iterator[PiecePrices]:
    """Per region of `program` what its pieces cost."""
    for region in program.regions:
        rules = typed_rules(region.ops, region.typing, region.name, costs.mesh)
        yield PiecePrices(region.ops, rules, costs)


def schedule_region(region: RegionProgram, prices: PiecePrices, bound_bytes: int) -> RegionSchedule:
    """The schedule of an emitted region. bound_bytes: what may be held for W's."""
    return _Scheduler(region, prices, bound_bytes).schedule()


class _Scheduler:
    def __init__(self, region: RegionProgram, prices: PiecePrices, bound_bytes: int) -> None:
        self.prices = prices
        self.ops: OpGraph = prices.ops
        self.costs = prices.costs
        self.region = region
        self.buckets = region.buckets
        self.bound_bytes = bound_bytes
        self.pieces = cut_in_pieces(region.graph.graph)
        self.makers = self.pieces.makers()
        self.late: dict[int, tuple[float, int]] = {}
        """Per piece with a W its seconds and the bytes held for it."""

    def schedule(self) -> RegionSchedule:
        collectives = [p for p in self.pieces.pieces if p.kind != "ops"]
        if any(self.prices.conversion(piece, 1)[1] for piece in collectives):
            self._split_weights()
        return RegionSchedule(
            self.pieces,
            {k: seconds for k, (seconds, _) in self.late.items()},
            {k: held_bytes for k, (_, held_bytes) in self.late.items()},
            self._forward(),
            self._backward(),
        )

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

    def _forward(self) -> tuple[Move, ...]:
        moves: list[Move] = []
        tasks: list[Task] = []
        at: dict[int, int] = {}
        opened: dict[int, int] = {}
        for k, piece in enumerate(self.pieces.pieces):
            for b in self._read_buckets(piece):
                if b not in opened:
                    opened[b] = len(tasks)
                    moves.append(Move("O", b))
                    tasks.append(Task(seconds=self.prices.cast_s(self.buckets[b])))
            needs = {at[self.makers[name]] for name in piece.inputs if name in self.makers}
            needs |= {opened[b] for b in self._read_buckets(piece)}
            at[k] = len(tasks)
            moves.append(Move("F", k))
            tasks.append(self._task(piece, 0, tuple(sorted(needs)), at))
        made = [t for b, t in opened.items() if self.buckets[b].is_made]
        if made:
            # Not before its own have come: three regions would be whole, one of them in flight.
            moves.append(Move("G"))
            tasks.append(self._ahead(made[:1]))
        return tuple(moves[t] for t in list_order(tasks, self.bound_bytes))

    def _read_buckets(self, piece: Piece | Collective) -> list[int]:
        """Buckets that a piece reads members of."""
        members = self.pieces.members
        return sorted({members[name][0] for name in piece.inputs if name in members})

    # Backward.

    def _backward(self) -> tuple[Move, ...]:
        moves, tasks = [Move("A")], [Task()]
        at: dict[int, int] = {}
        last: dict[int, int] = {}
        """What makes the gradients of a piece's inputs, the last of it."""
        users = self._users()
        for k in reversed(range(len(self.pieces.pieces))):
            piece = self.pieces.pieces[k]
            needs = (0, *sorted(at[u] for u in users[k]))
            last[k] = at[k] = len(tasks)
            moves.append(Move("B", k))
            tasks.append(self._task(piece, 1, needs, at))
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
        if any(b.is_made for b in self.buckets) and not self.region.keeps_gathered:
            moves.append(Move("G"))
            tasks.append(self._ahead([0]))
        return tuple(moves[t] for t in list_order(tasks, self.bound_bytes))

    def _users(self) -> list[set[int]]:
        """Per piece those that read what it makes."""
        users: list[set[int]] = [set() for _ in self.pieces.pieces]
        for k, piece in enumerate(self.pieces.pieces):
            for name in piece.inputs:
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
            return Task(needs, 0.0, transfer.link, transfer.seconds)
        other = piece.partner if direction == 0 else self._wait_of(piece)
        return Task(needs) if transfer is None else Task(needs, start=at[other])

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
        if not axes:
            return Task(needs)
        kind = "reduce_scatter" if bucket.gather else "all_reduce"
        seconds = self.prices.bucket_s(kind, bucket, axes)
        return Task(needs, 0.0, self.costs.group_link(axes).name, seconds, floats=True)
