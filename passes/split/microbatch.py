"""The folded graph of one microbatch, written from the graph of the whole batch.

Microbatches are one more split of the batch, without communication: on a free axis
whose ranks run one after the other. So the batch is followed through the op rules on an axis of one
rank per sample, as on a data parallel axis (passes/region/data_parallel.py), once per model. Types
say which dims are split whatever the number of microbatches, hence

    graph(n)   every value at its local shape on that axis with n ranks, sizes among the arguments
               rewritten as for a rank (passes/rules/localize.py), a selection where an op takes its
               slice of a value of the whole batch, and a division where a mean is taken over the
               batch

is an ordinary folded graph with a batch of 1/n, as the model would have been captured with it.
Region searches, prices and memory work on it as on any other. Gradients of parameters and the loss
are pending sums on the axis: accumulated, not communicated. So that the sum over microbatches is
the loss of the batch, a mean over the batch divides by the numbers of the batch: mean / n, and
losses over classes the sum over rows by the targets of the whole step that count (COUNT, known
before the first microbatch, see passes/split/loss_counts.py). What is the same in all of them and
added to such a sum (a penalty on parameters) is one nth in each.

Inputs that some op needs for the whole batch (T5 shifts its labels) are not sliced: they are there
before the first microbatch. Any other value of which an op needs more than a slice (similarities of
all samples, an op without a rule, a product of two means) would not be what one process computes:
several microbatches of such a model are refused, naming the op and its line. One is always there.

Batch norms take statistics over the batch, and update buffers. Where the user says so
(per_microbatch), each microbatch has statistics of its own and updates the buffers after the one
before, as if one process ran the microbatches one after the other. Updates in which no sample has a
part (the power iteration of a spectral norm) are the same in all, and written once.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from meshfold.errors import OptionError
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.op_graph import (
    Arg,
    Dependence,
    Draw,
    FoldedGraph,
    Op,
    OpGraph,
    OutputInfo,
    Ref,
    SourceKind,
    Symbol,
    Value,
)
from meshfold.ir.options import BATCH_NORM, PER_MICROBATCH, PinValue
from meshfold.ir.spmd import INVARIANT, PARTIAL, Layout, local_shape
from meshfold.ir.strategy import OpTyping, RegionTyping
from meshfold.passes.graph.places import made_at, op_place, read_name
from meshfold.passes.graph.typed import layouts_of_values
from meshfold.passes.rules.localize import localize
from meshfold.passes.rules.ops.random import draw_of
from meshfold.passes.rules.table import rule_locals, summed_axes
from meshfold.passes.split.loss_counts import COUNT, loss_counts, takes_mean, with_sum
from meshfold.passes.split.samples import (
    STATISTIC,
    follow_samples,
    is_per_microbatch,
    made_without_batch,
    over_batch,
)

UNSLICED: Layout = (INVARIANT,)
MICROBATCH = Symbol("microbatch", "number")
"""Stands in an argument for the number of the microbatch that runs."""
DIVIDE = "aten.div.Tensor"


ONE_MICROBATCH = "plan one microbatch on one rank of dp"
STATISTICS = (
    "pin batch_norm=microbatch for statistics and updates of each microbatch, plan one microbatch, "
    "or compile model.eval() if that keeps buffers as they are"
)
"""What to do instead."""


def has_own_statistics(pins: Mapping[str, PinValue]) -> bool:
    """Whether pins, of options or of a plan, give each microbatch statistics of its own."""
    return pins.get(BATCH_NORM) == PER_MICROBATCH


@dataclass(frozen=True)
class _Need:
    """Value `value` of region `region`, which its op number `op` needs for the whole batch, or
    makes where a later region does."""

    region: int
    value: int
    op: int


class MicrobatchGraphs:
    """Folded graphs of the microbatches of one program.

    refusal: why there cannot be several microbatches, or nothing. per_microbatch: whether each has
    statistics and updates of buffers of its own. Raises OptionError for outputs asked for sharded.
    """

    def __init__(
        self,
        folded: FoldedGraph,
        cluster: ClusterSpec,
        batch_size: int,
        *,
        per_microbatch: bool = False,
    ) -> None:
        self.folded = folded
        self.batch_size = batch_size
        self.per_microbatch = per_microbatch
        self.refusal = ""
        if folded.returns.sharded:
            raise OptionError(
                "sharded_outputs: stages and microbatches gather their outputs; leave it out, or "
                "plan one stage and one microbatch"
            )
        self._known: dict[int, FoldedGraph] = {1: folded}
        if batch_size > 1:
            self._follow(cluster)
            why = next(self._refusals(), "")
            self.refusal = why and f"the batch cannot be split into microbatches: {why}"

    def _follow(self, cluster: ClusterSpec) -> None:
        """Type every region on the free axis. What is made without the batch (noise) leaves its
        region whole where a dim of it only happens to be as large, and all of that (weights that
        are standardized in a region of their own) where an op needs the whole batch otherwise."""
        whole: frozenset[int] = frozenset()
        while True:
            batch = follow_samples(self.folded, cluster, self.batch_size, whole, sums=True)
            self._boundaries = boundaries = batch.boundaries
            self._typings = batch.typings
            slots = boundaries.slots
            needs = self._needed_full()
            crossing = [n for n in needs if n.value < len(slots[n.region])]
            needed = {slots[n.region][n.value] for n in crossing}
            apart = {c for c in needed - whole if c is not None and self._is_apart(c)}
            if not apart and (len(crossing) < len(needs) or needed - boundaries.inputs):
                leaving = {c for classes in boundaries.outputs for c in classes} - whole
                apart = {c for c in leaving if c is not None and self._is_apart(c)}
            if not apart:
                break
            whole |= apart
        self._unsliced = [
            frozenset(i for i, c in enumerate(of_region) if c in needed & boundaries.inputs)
            for of_region in boundaries.slots
        ]

    def _is_apart(self, boundary_class: int) -> bool:
        """Whether no region that makes this value reads the batch for it."""
        makers = [
            made_without_batch(region.graph, v)
            for region, classes in zip(self.folded.regions, self._boundaries.outputs, strict=True)
            for v, c in zip(region.graph.outputs, classes, strict=True)
            if c == boundary_class
        ]
        return bool(makers) and all(makers)

    def _refusals(self) -> Iterator[str]:
        """What forbids microbatches."""
        try:
            loss_counts(self.folded)
        except OptionError as error:
            yield str(error)
        for need, native, wanted in self._used():
            graph = self.folded.regions[need.region].graph
            if _is_shared(native, wanted) and not _is_float(graph.values[need.value]):
                where = op_place(self.folded, need.region, need.op)
                name = read_name(self.folded, need.region, need.value)
                yield f"{where} adds {name}, whole numbers, to a sum over them; {ONE_MICROBATCH}"
        for need in self._needed_full():
            if need.value not in self._unsliced[need.region]:
                where = op_place(self.folded, need.region, need.op)
                name = read_name(self.folded, need.region, need.value)
                yield f"{where} needs {name} of all samples at once; {ONE_MICROBATCH}"
        if not self.per_microbatch:
            yield from self._statistics()
        yield from self._outputs()

    def _outputs(self) -> Iterator[str]:
        """A loss that is no sum over the batch, since microbatches add up, and other outputs that
        cannot be put together from those of microbatches."""
        apart = self.folded.apart
        for output in self.folded.outputs:
            (found,) = self._output_layout(output)
            if output in apart:
                if found.is_shard and found.blocks > 1:
                    yield (
                        f"output {output.name!r} has the samples of a microbatch in several "
                        f"places; leave it out of outputs, or {ONE_MICROBATCH}"
                    )
            elif output.shape or found != PARTIAL:
                yield (
                    f"the model returns a tensor of shape {list(output.shape)}"
                    f"{made_at(self.folded, output.source)}, not a loss that is a sum or mean over "
                    f"the batch; pass labels, or {ONE_MICROBATCH}"
                )

    def _statistics(self) -> Iterator[str]:
        """What looks at more than one microbatch, or is changed by every one."""
        for r, (region, typing) in enumerate(zip(self.folded.regions, self._typings, strict=True)):
            for k, chosen in enumerate(typing.ops):
                if not any(map(is_per_microbatch, chosen.inputs)):
                    continue  # as of a weight that is standardized
                if does := over_batch(region.graph, k, chosen):
                    instead = STATISTICS if does == STATISTIC else ONE_MICROBATCH
                    yield f"{op_place(self.folded, r, k)} {does}; {instead}"
        for instance in self.folded.instances:
            graph = self.folded.regions[instance.region].graph
            for slot, value in graph.mutations:
                if graph.values[value].depends is not Dependence.BATCH:
                    continue  # as of a power iteration: the same in all, written once
                where = op_place(self.folded, instance.region, graph.producers[value])
                yield (
                    f"every one of them would update buffer {instance.sources[slot].name} ({where})"
                    f"; {STATISTICS}"
                )

    def output_layouts(self) -> tuple[Layout, ...]:
        """Layout of every output but the loss on the free axis."""
        return tuple(map(self._output_layout, self.folded.apart))

    def _output_layout(self, output: OutputInfo) -> Layout:
        """What a microbatch has of an output."""
        if output.source.kind is not SourceKind.VALUE or self.batch_size == 1:
            return UNSLICED
        region = self.folded.instances[output.source.instance].region
        graph = self.folded.regions[region].graph
        natives = [x for x, _ in layouts_of_values(graph, self._typings[region])]
        return natives[graph.outputs[output.source.output]]

    def input_layouts(self) -> dict[str, Layout]:
        """Layout of every model input on the free axis: which dim is split, if any."""
        layouts: dict[str, Layout] = {}
        if self.batch_size == 1:
            return layouts
        for instance in self.folded.instances:
            typing, unsliced = self._typings[instance.region], self._unsliced[instance.region]
            for i, source in enumerate(instance.sources):
                if source.kind is SourceKind.INPUT:
                    layouts[source.name] = UNSLICED if i in unsliced else typing.slots[i]
        return layouts

    def graph(self, count: int) -> FoldedGraph:
        """The program over one of `count` microbatches of the batch. Raises OptionError, naming op
        and line, where the batch cannot be split."""
        if count > 1 and self.refusal:
            raise OptionError(self.refusal)
        if count not in self._known:
            if self.batch_size % count:
                raise ValueError(
                    f"a batch of {self.batch_size} does not divide into {count} microbatches"
                )
            self._known[count] = replace(
                self.folded,
                regions=tuple(
                    replace(region, graph=_Writer(region.graph, typing, unsliced, count).graph())
                    for region, typing, unsliced in zip(
                        self.folded.regions, self._typings, self._unsliced, strict=True
                    )
                ),
            )
        return self._known[count]

    def _needed_full(self) -> list[_Need]:
        """What is split, or a pending sum, and then needed for the whole batch."""
        return [need for need, x, wanted in self._used() if x != wanted and is_per_microbatch(x)]

    def _used(self) -> Iterator[tuple[_Need, Layout, Layout]]:
        """Every use of a value, its own layout, and the one that is wanted. The model's outputs are
        none: sums over microbatches are their value."""
        for r, typing in enumerate(self._typings):
            graph = self.folded.regions[r].graph
            native = [layout for layout, _ in layouts_of_values(graph, typing)]
            for k, (op, chosen) in enumerate(zip(graph.ops, typing.ops, strict=True)):
                for v, layout in zip(op.operands, chosen.inputs, strict=True):
                    yield _Need(r, v, k), native[v], layout
            crossing = zip(graph.outputs, typing.outputs, self._boundaries.outputs[r], strict=True)
            for v, layout, c in crossing:
                if c not in self._boundaries.results:
                    yield _Need(r, v, graph.producers[v]), native[v], layout


def _is_shared(native: Layout, wanted: Layout) -> bool:
    """Whether all microbatches have the same of what is to be a summand of each."""
    return wanted[0] == PARTIAL and not is_per_microbatch(native)


def _is_float(value: Value) -> bool:
    return value.dtype.startswith(("float", "bfloat", "complex"))


class _Writer:
    """Writes the graph of a region for one microbatch. unsliced: slots that are not split."""

    def __init__(
        self, graph: OpGraph, typing: RegionTyping, unsliced: frozenset[int], num_microbatches: int
    ) -> None:
        self.batch_graph = graph
        self.typing = typing
        self.sizes = (num_microbatches,)
        self.native = [
            UNSLICED if v in unsliced else layout
            for v, (layout, _) in enumerate(layouts_of_values(graph, typing))
        ]
        self.values = [self._slice(v, layout) for v, layout in enumerate(self.native)]
        self.ops: list[Op] = []
        self._slices: dict[tuple[int, Layout], int] = {}

    def graph(self) -> OpGraph:
        """The finished graph; values that it adds come last."""
        graph = self.batch_graph
        for k, chosen in enumerate(self.typing.ops):
            args, kwargs = localize(graph, k, chosen, self.sizes)
            operands = zip(graph.ops[k].operands, chosen.inputs, strict=True)
            read = [self._in(v, layout) for v, layout in operands]
            op = replace(graph.ops[k], args=args, kwargs=kwargs, draw=self._draw(k))
            self._add(k, chosen, op.on_values(read, op.outputs))
        outputs = zip(graph.outputs, self.typing.outputs, strict=True)
        leaving = tuple(self._in(v, layout) for v, layout in outputs)
        return OpGraph(graph.slots, tuple(self.values), tuple(self.ops), leaving, graph.mutations)

    def _add(self, k: int, chosen: OpTyping, op: Op) -> None:
        """Write op number `k`, and behind a mean over the batch what it is divided by."""
        divisor: Arg = None
        if self.sizes[0] > 1 and summed_axes(self.batch_graph, k, chosen):
            if "mean" in rule_locals(self.batch_graph, k, chosen):
                divisor = self.sizes[0]
            elif takes_mean(op):
                op, divisor = with_sum(op), Symbol(COUNT, str(k))
        if divisor is None:
            self.ops.append(op)
            return
        (result,) = op.outputs
        total = self._new(self.values[result])
        self.ops.append(replace(op, outputs=(total,)))
        self.ops.append(replace(op, target=DIVIDE, args=(Ref(total), divisor), kwargs=()))

    def _draw(self, k: int) -> Draw | None:
        """This microbatch's slice of what op `k` draws for the batch; all of it where the op does
        not see the batch."""
        op = self.batch_graph.ops[k]
        draw, layout = draw_of(op, k), self.native[op.outputs[0]]
        if draw is None or not layout[0].is_shard:
            return draw
        return replace(draw, dim=layout[0].dim, blocks=layout[0].blocks, microbatches=self.sizes[0])

    def _new(self, value: Value) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def _slice(self, v: int, layout: Layout) -> Value:
        value = self.batch_graph.values[v]
        return replace(value, shape=local_shape(value.shape, layout, self.sizes))

    def _in(self, v: int, layout: Layout) -> int:
        """The value that is `v` in `layout`: itself, this microbatch's slice of it, or its share in
        a sum over them."""
        is_shared = self.sizes[0] > 1 and _is_shared(self.native[v], layout)
        if not is_shared and (self.native[v][0].is_shard or not layout[0].is_shard):
            return v
        if (v, layout) not in self._slices:
            made = self._divided(v) if is_shared else self._selected(v, layout)
            self._slices[v, layout] = made
        return self._slices[v, layout]

    def _divided(self, v: int) -> int:
        share = self._new(self.values[v])
        self.ops.append(Op(DIVIDE, (Ref(v), self.sizes[0]), (), (share,)))
        return share

    def _selected(self, v: int, layout: Layout) -> int:
        """Selects the microbatch on the dim as (blocks, microbatches, rest)."""
        of_slice, dim, blocks = self._slice(v, layout), layout[0].dim, layout[0].blocks
        shape, rest = of_slice.shape, of_slice.shape[dim] // blocks
        digits = (self.sizes[0], rest) if blocks == 1 else (blocks, self.sizes[0], rest)
        split = self._new(replace(of_slice, shape=(*shape[:dim], *digits, *shape[dim + 1 :])))
        self.ops.append(Op("aten.unflatten.int", (Ref(v), dim, digits), (), (split,)))
        at = dim + len(digits) - 2
        selected = (*digits[:-2], rest)
        chosen = self._new(replace(of_slice, shape=(*shape[:dim], *selected, *shape[dim + 1 :])))
        self.ops.append(Op("aten.select.int", (Ref(split), at, MICROBATCH), (), (chosen,)))
        if blocks == 1:
            return chosen
        joined = self._new(of_slice)
        self.ops.append(Op("aten.reshape.default", (Ref(chosen), shape), (), (joined,)))
        return joined
