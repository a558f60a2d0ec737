"""The targets of a batch that count, see passes/split/loss_counts.py, evaluated before a step."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from meshfold.ir.op_graph import FoldedGraph, Source, SourceKind
from meshfold.ops.reference_interpreter import run_op
from meshfold.passes.split.loss_counts import InstanceOp, LossCount

Tensors = Mapping[str, Tensor]


def count_targets(
    folded: FoldedGraph,
    counts: Sequence[LossCount],
    constants: Tensors,
    buffers: Tensors,
    whole_input: Callable[[str], Tensor],
    device: torch.device,
) -> dict[InstanceOp, float]:
    """Per loss of `counts` how many targets of the global batch it does not ignore; where classes
    have weights, the sum of those of the targets.

    folded: the program of the global batch; constants, buffers: by name; whole_input: an input of
    the global batch by name.
    """
    computed: dict[tuple[int, int], Tensor] = {}
    done: set[InstanceOp] = set()

    def value_of(k: int, v: int) -> Tensor:
        if (k, v) not in computed:
            computed[k, v] = fetch(folded.instances[k].sources[v])
        return computed[k, v]

    def fetch(source: Source) -> Tensor:
        match source.kind:
            case SourceKind.INPUT:
                return whole_input(source.name)
            case SourceKind.BUFFER:
                return buffers[source.name]
            case SourceKind.CONSTANT:
                return constants[source.name].to(device)
        region = folded.regions[folded.instances[source.instance].region]
        return value_of(source.instance, region.graph.outputs[source.output])

    found: dict[InstanceOp, float] = {}
    with torch.no_grad():
        for count in counts:
            for k, n in count.ops:
                if (k, n) in done:
                    continue
                done.add((k, n))
                op = folded.regions[folded.instances[k].region].graph.ops[n]
                operands = {v: value_of(k, v) for v in op.operands}
                results = run_op(op, operands, folded.instances[k].floats, device)
                computed.update({(k, v): x for v, x in zip(op.outputs, results, strict=True)})
            targets = value_of(*count.target)
            counted = targets[targets != count.ignore_index]
            weight = None if count.weight is None else value_of(*count.weight)
            found[count.op] = counted.numel() if weight is None else float(weight[counted].sum())
    computed.clear()  # the two functions refer to each other: until the next collection
    return found
