"""Run a folded graph op by op on real tensors in one process: the meaning of an op graph.

Slow and plain on purpose. Emitted programs and captures are held against it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from meshfold.ir.op_graph import Arg, FoldedGraph, Hole, Op, Ref, Source, SourceKind, Symbol
from meshfold.ops.registry import op_function
from meshfold.torch_compat.dtypes import torch_constant

Tensors = Mapping[str, torch.Tensor]

Watch = Callable[[int, int, torch.Tensor], None]
"""(instance, value of its region, tensor)."""


def run_graph(
    folded: FoldedGraph,
    parameters: Tensors,
    buffers: Tensors,
    constants: Tensors,
    inputs: Tensors,
    watch: Watch | None = None,
) -> dict[str, torch.Tensor]:
    """Outputs of the program by name, differentiable in `parameters`.

    All mappings are by canonical name. Buffer updates are applied to `buffers` in place, after the
    last op. watch: called for every value that an op makes.

    Raises UnsupportedOpError for an op that this torch does not have.
    """
    # The backward may need a buffer as it was read.
    buffers_read = {name: buffer.clone() for name, buffer in buffers.items()}
    leaves = {
        SourceKind.PARAMETER: parameters,
        SourceKind.BUFFER: buffers_read,
        SourceKind.CONSTANT: constants,
        SourceKind.INPUT: inputs,
    }
    computed: list[tuple[torch.Tensor, ...]] = []
    updates: list[tuple[str, torch.Tensor]] = []

    def fetch(source: Source) -> torch.Tensor:
        if source.kind is SourceKind.VALUE:
            return computed[source.instance][source.output]
        whole, part = leaves[source.kind][source.name], source.slice
        return whole if part is None else whole.chunk(part.count, part.dim)[part.number]

    device = next(iter(inputs.values())).device
    for k, instance in enumerate(folded.instances):
        graph = folded.regions[instance.region].graph
        values = dict(enumerate(map(fetch, instance.sources)))
        for op in graph.ops:
            results = run_op(op, values, instance.floats, device)
            values.update(zip(op.outputs, results, strict=True))
            if watch is not None:
                for v in op.outputs:
                    watch(k, v, values[v])
        computed.append(tuple(values[v] for v in graph.outputs))
        updates += [(instance.sources[slot].name, values[v]) for slot, v in graph.mutations]
    outputs = {out.name: fetch(out.source) for out in folded.outputs}
    with torch.no_grad():
        for name, value in updates:
            buffers[name].copy_(value)
    return outputs


def run_op(
    op: Op, values: Mapping[int, torch.Tensor], floats: tuple[float, ...], device: torch.device
) -> tuple[torch.Tensor, ...]:
    """The tensors that one op returns, a list result flattened."""
    args = [argument(a, values, floats, device) for a in op.args]
    kwargs = {name: argument(a, values, floats, device) for name, a in op.kwargs}
    result = op_function(op)(*args, **kwargs)
    if isinstance(result, torch.Tensor):
        return (result,)
    return tuple(t for t in result if t is not None)


def argument(
    arg: Arg,
    values: Mapping[int, torch.Tensor] | Sequence[torch.Tensor],
    floats: Sequence[float],
    device: torch.device,
) -> Any:
    """What an op is called with: tensors for references, numbers for holes."""
    if isinstance(arg, Ref):
        return values[arg.index]
    if isinstance(arg, Hole):
        return floats[arg.index]
    if isinstance(arg, Symbol):
        return torch_constant(arg, device)
    return [argument(a, values, floats, device) for a in arg] if isinstance(arg, tuple) else arg
