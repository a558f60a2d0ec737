"""What the worker processes of tests/compiler/distributed/test_rank_mesh.py run."""

from typing import Any

import torch
from torch import Tensor

from meshfold.distributed.rank_mesh import process_mesh
from meshfold.ir.mesh import Mesh
from meshfold.ir.op_graph import Value
from meshfold.ir.spmd import Layout
from meshfold.passes.price.conversions import conversion_steps
from support.graphs.conversions import apply_step
from support.graphs.layouts import FlatCosts, cut, gradient_layout

CPU = torch.device("cpu")


def every_collective(mesh: Mesh, dtype: torch.dtype) -> dict[str, list[Any]]:
    """Results as lists: tensors in shared memory would outlive the pool."""
    ranks = process_mesh(mesh, CPU)
    (axis, *_) = mesh.names
    axes, size, rank = (axis,), ranks.size((axis,)), ranks.coord(axis)
    x = (torch.arange(2 * size) + 10 * rank).to(dtype)
    started = {
        "all_gather": ranks.start_all_gather(x, axes),
        "all_to_all": ranks.start_all_to_all(x, axes),
    }
    if dtype != torch.bool:
        started["all_reduce"] = ranks.start_all_reduce(x, axes)
        started["reduce_scatter"] = ranks.start_reduce_scatter(x, axes)
        if not dtype.is_complex:
            started["maximum"] = ranks.start_all_reduce(x, axes, "max")
    found = {name: ranks.wait(t).tolist() for name, t in started.items()}
    return {**found, "input": x.tolist()}


def convert(
    mesh: Mesh, shape: tuple[int, ...], pairs: list[tuple[Layout, Layout]]
) -> list[tuple[list[Any], list[Any]]]:
    """The local result and gradient of a random value, by pair of layouts."""
    ranks = process_mesh(mesh, CPU)
    value = Value(shape, "float64", requires_grad=True)
    x, cotangent = samples(shape)
    out = []
    for source, target in pairs:
        generator = torch.Generator().manual_seed(0)
        local = cut(x, source, mesh, generator)[ranks.rank].requires_grad_()
        pulled = cut(cotangent, gradient_layout(target), mesh, generator)[ranks.rank]
        y = local * 1.0
        for step in conversion_steps(value, source, target, FlatCosts(mesh)):
            y = apply_step(ranks, y, step, value)
        (gradient,) = torch.autograd.grad(y, local, pulled)
        out.append((y.tolist(), gradient.tolist()))
    return out


def samples(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """A value and a gradient, the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x, torch.randn(shape, generator=generator, dtype=torch.float64)


def wrong_size() -> str:
    try:
        process_mesh(Mesh(()), CPU)
    except ValueError as error:
        return str(error)
    return ""


def many_in_flight(mesh: Mesh, kind: str, rounds: int, at_once: int) -> int:
    """How often what was brought was wrong."""
    ranks = process_mesh(mesh, CPU)
    (axis, *_) = mesh.names
    size, num_wrong = ranks.size((axis,)), 0
    for k in range(rounds):
        sent = [torch.full((size, 3, 5), float(k + n)) for n in range(at_once)]
        started = [getattr(ranks, f"start_{kind}")(x, (axis,)) for x in sent]
        for x, in_flight in zip(sent, started, strict=True):
            factor = size if "reduce" in kind else 1  # all ranks send the same
            num_wrong += bool((ranks.wait(in_flight) != factor * x[0, 0, 0]).any())
    return num_wrong
