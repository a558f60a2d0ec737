"""An eager program is issued op by op by one thread of the host, ahead of the device: the ops of a
region take the longer of their kernels and

    forward     host_op_s * number of ops
    backward    host_op_s * number of ops that have a gradient

What the host needs longer is divided evenly among the ops, so that sums, events and what is
recomputed all have it. Collectives between ops are not taken off it: published steps of small
models under tensor parallelism are 3 to 30 % longer than with that, not shorter
(VIA-Research/vTrain).
"""

from collections.abc import Sequence
from dataclasses import replace

from meshfold.ir.op_graph import OpGraph
from meshfold.passes.price.op_time import OpTime


def issued_by_host(times: Sequence[OpTime], graph: OpGraph, host_op_s: float) -> list[OpTime]:
    """`times` of the ops of a region with what the host needs longer. host_op_s: seconds per op."""
    if not host_op_s or not times:
        return list(times)
    trained = [any(graph.values[v].requires_grad for v in op.outputs) for op in graph.ops]
    forward_s = _idle_s(sum(t.forward_s for t in times), len(times), host_op_s)
    backward_s = _idle_s(sum(t.backward_s for t in times), sum(trained), host_op_s)
    if not forward_s and not backward_s:
        return list(times)
    return [
        replace(t, forward_s=t.forward_s + forward_s, backward_s=t.backward_s + has * backward_s)
        for t, has in zip(times, trained, strict=True)
    ]


def _idle_s(device_s: float, num_ops: int, host_op_s: float) -> float:
    """What each op waits for the host."""
    return max(0.0, host_op_s - device_s / num_ops) if num_ops else 0.0
