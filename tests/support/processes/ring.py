"""Clusters on which keys and values go round, and what the processes of ring attention run."""

from dataclasses import replace

import torch
from torch import Tensor

from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.distributed.rank_mesh import process_mesh
from meshfold.distributed.step_context import StepContext
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.mesh import Mesh
from meshfold.ir.strategy import OpTyping
from meshfold.passes.rules.ops.attention import RING
from support.graphs.layouts import cut, gradient_layout
from support.graphs.ops import SingleOp

ATTENTION = "aten.scaled_dot_product_attention.default"


def slow_devices(num_devices: int) -> ClusterSpec:
    """Without latency, and products so slow that keys and values arrive meanwhile."""
    cluster = resolve_cluster("local-cpu", num_devices)
    (group,) = cluster.groups
    link = replace(group.link, latency_s=0.0, start_s=0.0, ramp_bytes=0.0, bytes_per_s=1e9)
    device = replace(
        group.device,
        launch_s=0.0,
        memory_bytes_per_s=1e14,
        peak_flops_per_s=dict.fromkeys(group.device.peak_flops_per_s, 1e9),
    )
    return replace(cluster, groups=(replace(group, link=link, device=device),))


def rings_of(program: EmittedProgram) -> list[str]:
    """The cp rule of every attention op."""
    axis = program.mesh.index("cp")
    return [
        typing.rules[axis].partition("/")[0]
        for region, of_region in zip(program.folded.regions, program.typings, strict=True)
        for op, typing in zip(region.graph.ops, of_region.ops, strict=True)
        if op.target == ATTENTION
    ]


def ring_typing(op: SingleOp, size: int, place: int = 1) -> OpTyping:
    """The typing of an attention op on an axis of `size` ranks whose keys go round."""
    name = RING if place == 1 else f"{RING}/{place}"
    (typing,) = (t for t in op.typings(size) if t.rules == (name,))
    return typing


def ring_operands(kind: str) -> SingleOp:
    """One op: causal with shared key heads, or under a mask of numbers with a gradient."""
    shapes = (2, 4, 12, 4), (2, 2 if kind == "causal" else 4, 12, 4)
    generator = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in (shapes[0], shapes[1], shapes[1])
    )
    if kind == "causal":
        return SingleOp(ATTENTION, query, key, value, is_causal=True, enable_gqa=True)
    mask = torch.randn(4, 12, 12, generator=generator, dtype=torch.float64)
    return SingleOp(ATTENTION, query, key, value, mask.requires_grad_())


def ring_errors(mesh: Mesh, kind: str) -> list[float]:
    """On a process: largest differences from the unsharded op, of the result and every gradient."""
    ranks = process_mesh(mesh, torch.device("cpu"))
    op = ring_operands(kind)
    typing = ring_typing(op, mesh.sizes[0])
    cotangents, results, gradients = op.on_one_rank

    def part(x: Tensor, layout: object) -> Tensor:
        return cut(x.detach(), layout, mesh, torch.Generator())[ranks.rank]  # type: ignore[arg-type]

    leaves = [
        part(x, layout).requires_grad_()
        for x, layout in zip(op.tensors, typing.inputs, strict=True)
    ]
    (made,) = op.emitted(typing, mesh)(StepContext(ranks), *leaves)
    pulled = part(cotangents[0], gradient_layout(typing.outputs[0]))
    found = torch.autograd.grad(made, leaves, pulled)
    errors = [float((made.detach() - part(results[0], typing.outputs[0])).abs().max())]
    for gradient, right, layout in zip(found, gradients, typing.inputs, strict=True):
        errors.append(float((gradient - part(right, gradient_layout(layout))).abs().max()))
    ranks.close()
    return errors
