"""The number of targets of a batch that count: what a mean over them divides by.

Losses over classes take the mean over the targets that are not ignored, and microbatches may ignore
unequal numbers: the mean of their means is not the mean of the batch. So microbatches add up sums,
divided by the count of the full batch. Targets follow from the inputs alone (labels, shifted), so
the count is known before the first microbatch runs: `loss_counts` gives the ops that lead from the
inputs to each target. Where classes have weights, targets count as much as their classes weigh. A
loss whose targets or weights follow from parameters is refused by name.
"""

from dataclasses import dataclass, replace

from meshfold.errors import OptionError
from meshfold.ir.op_graph import Arg, FoldedGraph, Op, Ref, Source, SourceKind
from meshfold.passes.rules.ops.loss import (
    CROSS_ENTROPY,
    LINEAR_CROSS_ENTROPY,
    MEAN,
    NARROW_CROSS_ENTROPY,
    NLL_LOSS,
    SUM,
)
from meshfold.passes.rules.table import OP_RULES

COUNT = "count"
"""Kind of the Symbol that stands for the count of a loss; its text is the number of the op."""
COUNTED = (CROSS_ENTROPY, NARROW_CROSS_ENTROPY, LINEAR_CROSS_ENTROPY, NLL_LOSS)
"""Losses whose mean is over targets that count."""
IGNORED = -100
"""What they ignore unless it is told otherwise."""

InstanceOp = tuple[int, int]
"""(instance, op of its region)."""


@dataclass(frozen=True)
class LossCount:
    """A loss with a mean over targets. target, weight: (instance, value) of the targets, and of the
    weights of classes [classes], if any; ops: those that compute both from inputs, buffers and
    constants, in execution order."""

    op: InstanceOp
    target: tuple[int, int]
    ignore_index: int
    ops: tuple[InstanceOp, ...]
    weight: tuple[int, int] | None = None
    buffers: frozenset[str] = frozenset()
    """What of the model's buffers both follow from."""


def takes_mean(op: Op) -> bool:
    """Whether an op is a loss that takes the mean over targets that count."""
    return op.target in COUNTED and _arguments(op).get("reduction", MEAN) == MEAN


def with_sum(op: Op) -> Op:
    """The loss that sums where `op` takes the mean."""
    arguments = {"bias": None, "weight": None, **_arguments(op), "reduction": SUM}
    names = OP_RULES[op.target].parameters
    given = tuple(arguments[name] for name in names[: names.index("reduction") + 1])
    rest = tuple((n, arguments[n]) for n in names[len(given) :] if n in arguments)
    return replace(op, args=given, kwargs=rest)


def loss_counts(folded: FoldedGraph) -> tuple[LossCount, ...]:
    """The means over targets of a program, in execution order.

    Raises OptionError where targets, or weights of classes, follow from parameters.
    """
    found = []
    for k, instance in enumerate(folded.instances):
        graph = folded.regions[instance.region].graph
        for n, op in enumerate(graph.ops):
            if not takes_mean(op):
                continue
            argument = _arguments(op)["target"]
            assert isinstance(argument, Ref), "the targets of a loss are a tensor"
            target = argument.index
            if not graph.values[target].is_float:
                ignored = _arguments(op).get("ignore_index", IGNORED)
                assert isinstance(ignored, int)
                behind, weight = _Ancestors(folded, op), _arguments(op).get("weight")
                ops, weighs = behind.of(k, target), None
                if isinstance(weight, Ref):
                    ops, weighs = behind.of(k, weight.index), (k, weight.index)
                buffers = frozenset(behind.buffers)
                found.append(LossCount((k, n), (k, target), ignored, ops, weighs, buffers))
    return tuple(found)


def _place(op: Op) -> str:
    return f"{op.target} ({op.source or op.scope or 'the loss'})"


def _arguments(op: Op) -> dict[str, Arg]:
    return dict(zip(OP_RULES[op.target].parameters, op.args, strict=False)) | dict(op.kwargs)


class _Ancestors:
    """The ops behind a value."""

    def __init__(self, folded: FoldedGraph, loss: Op) -> None:
        self.folded = folded
        self.loss = loss
        self.found: set[InstanceOp] = set()
        self.buffers: set[str] = set()

    def of(self, instance: int, value: int) -> tuple[InstanceOp, ...]:
        """The ops that lead to a value of an instance, in execution order."""
        waiting = [(instance, value)]
        while waiting:
            k, v = waiting.pop()
            graph = self.folded.regions[self.folded.instances[k].region].graph
            producer = graph.producers[v]
            if producer < 0:
                waiting += self._behind(self.folded.instances[k].sources[v])
            elif (k, producer) not in self.found:
                self.found.add((k, producer))
                waiting += [(k, operand) for operand in graph.ops[producer].operands]
        return tuple(sorted(self.found))

    def _behind(self, source: Source) -> list[tuple[int, int]]:
        if source.kind is SourceKind.PARAMETER:
            raise OptionError(
                f"the targets of {_place(self.loss)}, or the weights of its classes, follow from "
                f"{source.name}, so what counts is not known before the step; plan one microbatch"
            )
        if source.kind is SourceKind.BUFFER:
            self.buffers.add(source.name)
        if source.kind is not SourceKind.VALUE:
            return []
        region = self.folded.regions[self.folded.instances[source.instance].region]
        return [(source.instance, region.graph.outputs[source.output])]
