"""The folded graph of one microbatch, written down from the graph of the whole batch.

Cutting the batch into microbatches is one more batch split, without communication: on a free axis
whose ranks run one after the other. So the batch is followed through the op rules on an axis of one
rank per sample, as on a data parallel axis (passes/region/data_parallel.py), once per model. Types
say which dims are cut whatever the number of parts, hence

    graph(n)   every value at its local shape on that axis with n ranks, sizes among the arguments
               rewritten as for a rank (passes/rules/localize.py), a selection where an op takes its
               part of what is whole, and a division where a mean is taken over the batch

is an ordinary folded graph with a batch of 1/n, as the model would have been captured with it.
Region searches, prices and memory work on it as on any other. Gradients of parameters and the loss
are pending sums on the axis: accumulated, not communicated. So that the sum over microbatches is
the loss of the batch, a mean over the batch divides by the numbers of the batch: mean / n, and
losses over classes the sum over rows by the targets of the whole step that count (COUNT, known
before the first microbatch, see passes/split/loss_counts.py).

Inputs that some op needs whole (T5 shifts its labels) stay whole: they are there before the first
microbatch. Any other value that an op needs whole where it is cut (statistics over the batch, an op
without a rule, a product of two means) would not be what one process computes: such a model is
refused, naming the value.
"""

from dataclasses import replace

from meshfold.errors import OptionError
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.op_graph import Arg, Draw, FoldedGraph, Op, OpGraph, Ref, SourceKind, Symbol, Value
from meshfold.ir.spmd import INVARIANT, PARTIAL, Layout, local_shape
from meshfold.ir.strategy import OpTyping, RegionTyping
from meshfold.passes.graph.typed import layouts_of_values, value_name
from meshfold.passes.rules.localize import localize
from meshfold.passes.rules.ops.random import draw_of
from meshfold.passes.rules.table import rule_locals, summed_axes
from meshfold.passes.split.loss_counts import COUNT, loss_counts, takes_mean, with_sum
from meshfold.passes.split.samples import OVER_BATCH, follow_samples, is_part, rebound

WHOLE: Layout = (INVARIANT,)
MICROBATCH = Symbol("microbatch", "number")
"""Stands in an argument for the number of the microbatch that runs."""
DIVIDE = "aten.div.Tensor"


class MicrobatchGraphs:
    """Folded graphs of the microbatches of one program.

    Raises OptionError, naming the value, where the batch cannot be cut.
    """

    def __init__(self, folded: FoldedGraph, cluster: ClusterSpec, batch_size: int) -> None:
        self.folded = folded
        self.batch_size = batch_size
        self._known: dict[int, FoldedGraph] = {1: folded}
        if batch_size > 1:
            self._follow(cluster)
            loss_counts(folded)
            refused = self._refused()
            if refused:
                raise OptionError(
                    f"the batch cannot be cut into microbatches: {refused} is needed whole"
                )
        _check_updates(folded)
        if batch_size > 1:
            self._check_results()

    def _follow(self, cluster: ClusterSpec) -> None:
        """Type every region on the free axis."""
        batch = follow_samples(self.folded, cluster, self.batch_size)
        self._boundaries = boundaries = batch.boundaries
        self._typings = batch.typings
        classes = {
            boundaries.slots[r][v] for r, v in self._needed_whole() if v < len(boundaries.slots[r])
        }
        self._whole = [
            frozenset(i for i, c in enumerate(of_region) if c in classes & boundaries.inputs)
            for of_region in boundaries.slots
        ]

    def _check_results(self) -> None:
        """Raises OptionError unless the model returns sums over the batch: microbatches add up."""
        for output in self.folded.outputs:
            layout = WHOLE
            if output.source.kind is SourceKind.VALUE:
                region = self.folded.instances[output.source.instance].region
                graph = self.folded.regions[region].graph
                natives = [x for x, _ in layouts_of_values(graph, self._typings[region])]
                layout = natives[graph.outputs[output.source.output]]
            if output.shape or layout != (PARTIAL,):
                raise OptionError(
                    f"the batch cannot be cut into microbatches: the model returns a tensor of "
                    f"shape {list(output.shape)}, not a loss that is a sum or mean over the batch; "
                    "pass labels, or plan one microbatch"
                )

    def _refused(self) -> str:
        """A value that forbids to cut the batch, or nothing."""
        for r, v in self._needed_whole():
            if v not in self._whole[r]:
                return value_name(self.folded.regions[r].graph, v)
        for region, typing in zip(self.folded.regions, self._typings, strict=True):
            for k, (op, chosen) in enumerate(zip(region.graph.ops, typing.ops, strict=True)):
                for local in rule_locals(region.graph, k, chosen)[1:]:
                    if local in OVER_BATCH:
                        return f"the input of {op.target}, which {OVER_BATCH[local]},"
        return ""

    def input_layouts(self) -> dict[str, Layout]:
        """Per model input its layout on the free axis: which dim is cut, if any."""
        cuts: dict[str, Layout] = {}
        if self.batch_size == 1:
            return cuts
        for instance in self.folded.instances:
            typing, whole = self._typings[instance.region], self._whole[instance.region]
            for i, source in enumerate(instance.sources):
                if source.kind is SourceKind.INPUT:
                    cuts[source.name] = WHOLE if i in whole else typing.slots[i]
        return cuts

    def graph(self, parts: int) -> FoldedGraph:
        """The program over one of `parts` equal parts of the batch."""
        if parts not in self._known:
            if self.batch_size % parts:
                raise ValueError(f"a batch of {self.batch_size} has no {parts} equal parts")
            self._known[parts] = replace(
                self.folded,
                regions=tuple(
                    replace(region, graph=_Cut(region.graph, typing, whole, parts).graph())
                    for region, typing, whole in zip(
                        self.folded.regions, self._typings, self._whole, strict=True
                    )
                ),
            )
        return self._known[parts]

    def _needed_whole(self) -> list[tuple[int, int]]:
        """(region, value) of what is cut, or a pending sum, and then needed whole. The model's own
        outputs are not: sums over microbatches are their value."""
        found = []
        for r, typing in enumerate(self._typings):
            graph = self.folded.regions[r].graph
            native = [layout for layout, _ in layouts_of_values(graph, typing)]
            wanted = [
                (v, layout)
                for op, chosen in zip(graph.ops, typing.ops, strict=True)
                for v, layout in zip(op.operands, chosen.inputs, strict=True)
            ]
            crossing = zip(graph.outputs, typing.outputs, self._boundaries.outputs[r], strict=True)
            wanted += [(v, x) for v, x, c in crossing if c not in self._boundaries.results]
            found += [(r, v) for v, x in wanted if native[v] != x and is_part(native[v])]
        return found


def _check_updates(folded: FoldedGraph) -> None:
    """Raises OptionError where the forward updates a buffer: every microbatch would do so again,
    and a stage that reads it might hold another one than the stage that updates it."""
    for instance in folded.instances:
        for slot, _ in folded.regions[instance.region].graph.mutations:
            raise OptionError(
                f"the batch cannot be cut into microbatches: every one of them would update buffer "
                f"{instance.sources[slot].name}; leave pipelines and microbatches out, or compile "
                "model.eval() if that keeps it as it is"
            )


class _Cut:
    """Writes the graph of one part of a region. whole: slots that are not cut."""

    def __init__(
        self, graph: OpGraph, typing: RegionTyping, whole: frozenset[int], parts: int
    ) -> None:
        self.whole_graph = graph
        self.typing = typing
        self.sizes = (parts,)
        self.native = [
            WHOLE if v in whole else layout
            for v, (layout, _) in enumerate(layouts_of_values(graph, typing))
        ]
        self.values = [self._part(v, layout) for v, layout in enumerate(self.native)]
        self.ops: list[Op] = []
        self._parts: dict[tuple[int, Layout], int] = {}

    def graph(self) -> OpGraph:
        """The finished graph; values that it adds come last."""
        graph = self.whole_graph
        for k, chosen in enumerate(self.typing.ops):
            args, kwargs = localize(graph, k, chosen, self.sizes)
            operands = zip(graph.ops[k].operands, chosen.inputs, strict=True)
            refs = iter([self._in(v, layout) for v, layout in operands])
            args = tuple(rebound(arg, refs) for arg in args)
            kwargs = tuple((name, rebound(arg, refs)) for name, arg in kwargs)
            op = replace(graph.ops[k], args=args, kwargs=kwargs, draw=self._draw(k))
            self._add(k, chosen, op)
        outputs = zip(graph.outputs, self.typing.outputs, strict=True)
        leaving = tuple(self._in(v, layout) for v, layout in outputs)
        return OpGraph(graph.slots, tuple(self.values), tuple(self.ops), leaving, graph.mutations)

    def _add(self, k: int, chosen: OpTyping, op: Op) -> None:
        """Write op number `k`, and behind a mean over the batch what it is divided by."""
        divisor: Arg = None
        if self.sizes[0] > 1 and summed_axes(self.whole_graph, k, chosen):
            if "mean" in rule_locals(self.whole_graph, k, chosen):
                divisor = self.sizes[0]
            elif takes_mean(op):
                op, divisor = with_sum(op), Symbol(COUNT, str(k))
        if divisor is None:
            self.ops.append(op)
            return
        (made,) = op.outputs
        total = self._new(self.values[made])
        self.ops.append(replace(op, outputs=(total,)))
        self.ops.append(replace(op, target=DIVIDE, args=(Ref(total), divisor), kwargs=()))

    def _draw(self, k: int) -> Draw | None:
        """This microbatch's slice of what op `k` draws for the batch; all of it where the op does
        not see the batch."""
        op = self.whole_graph.ops[k]
        draw, layout = draw_of(op, k), self.native[op.outputs[0]]
        if draw is None or not layout[0].is_shard:
            return draw
        return replace(draw, dim=layout[0].dim, blocks=layout[0].blocks, microbatches=self.sizes[0])

    def _new(self, value: Value) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def _part(self, v: int, layout: Layout) -> Value:
        value = self.whole_graph.values[v]
        return replace(value, shape=local_shape(value.shape, layout, self.sizes))

    def _in(self, v: int, layout: Layout) -> int:
        """The value that holds `v` as `layout` has it: itself, or this microbatch's part of it."""
        if self.native[v][0].is_shard or not layout[0].is_shard:
            return v
        if (v, layout) not in self._parts:
            self._parts[v, layout] = self._selected(v, layout)
        return self._parts[v, layout]

    def _selected(self, v: int, layout: Layout) -> int:
        """dim = (blocks, parts, rest): the number of the microbatch in the place of parts."""
        part, dim, blocks = self._part(v, layout), layout[0].dim, layout[0].blocks
        shape, rest = part.shape, part.shape[dim] // blocks
        digits = (self.sizes[0], rest) if blocks == 1 else (blocks, self.sizes[0], rest)
        split = self._new(replace(part, shape=(*shape[:dim], *digits, *shape[dim + 1 :])))
        self.ops.append(Op("aten.unflatten.int", (Ref(v), dim, digits), (), (split,)))
        at = dim + len(digits) - 2
        kept = (*digits[:-2], rest)
        chosen = self._new(replace(part, shape=(*shape[:dim], *kept, *shape[dim + 1 :])))
        self.ops.append(Op("aten.select.int", (Ref(split), at, MICROBATCH), (), (chosen,)))
        if blocks == 1:
            return chosen
        joined = self._new(part)
        self.ops.append(Op("aten.reshape.default", (Ref(chosen), shape), (), (joined,)))
        return joined
