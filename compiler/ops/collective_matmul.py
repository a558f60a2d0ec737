"""Collective matmul: products that overlap with the gather of their rows, or with the
reduce-scatter of their sums, shard by shard (Wang et al., Overlap Communication with Dependent
Computation via Decomposition, ASPLOS 2023; Chang et al., FLUX, 2024).

On an axis of n ranks, each with its shard of the rows and of the weights:

    all_gather_matmul      every rank multiplies the rows that it has and meanwhile passes them on,
                           its own first. Rows are unsharded in the results. The gradient of x is
                           computed as matmul_reduce_scatter's forward
    matmul_reduce_scatter  sums of rows go round; every rank adds its summand while the one before
                           is in flight, and its own rows come last. The gradient of x is computed
                           as all_gather_matmul's forward

Where ranks read each other's memory, torch's fused operators do the same without passes
(meshfold.torch_compat.symmetric_memory), in the cases that they have: one block, no bias in a sum,
and backward one product.

Gradients of weights are one product of whole rows each, of which all_gather_matmul keeps those that
came round, as a gather would. Collectives are the same on all ranks; where rows are put is not.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from meshfold.distributed.rank_mesh import RankMesh
from meshfold.distributed.step_context import StepContext
from meshfold.torch_compat.symmetric_memory import gathered_products, scattered_product


@dataclass(frozen=True, slots=True)
class _Ring:
    """mesh: None for a probe of memory, to which nothing comes; dim, blocks: of the rows, as in the
    type Shard(dim, blocks)."""

    mesh: RankMesh | None
    axis: str
    size: int
    coord: int
    dim: int
    blocks: int
    transposed: bool

    def part(self, whole: Tensor, owner: int) -> Tensor:
        """A view of the rows of a rank: [..., blocks, rows, ...]."""
        return _unflatten(whole, self.dim, (self.blocks, self.size, -1)).select(self.dim + 1, owner)

    def put(self, whole: Tensor, owner: int, rows: Tensor) -> None:
        self.part(whole, owner).copy_(_unflatten(rows, self.dim, (self.blocks, -1)))

    def put_product(
        self, whole: Tensor, owner: int, rows: Tensor, matrix: Tensor, bias: Tensor | None = None
    ) -> None:
        """Put rows [..., k] @ matrix [k, o] in their place, where the kernel can do that itself:
        if they are one piece of memory, or one per sample."""
        target = self.part(whole, owner)
        if target.is_contiguous():
            torch.mm(rows.flatten(0, -2), matrix, out=target.view(-1, matrix.shape[1]))
        elif target.dim() == 4 and self.blocks == self.dim == 1:
            samples = matrix.expand(rows.shape[0], *matrix.shape)
            torch.bmm(rows, samples, out=target.squeeze(1))
        else:
            self.put(whole, owner, rows @ matrix)
        if bias is not None:
            target += bias

    def empty(self, like: Tensor, width: int) -> Tensor:
        """Rows of all ranks, given those of one, of another width."""
        rows = like.shape[self.dim] * self.size
        return like.new_empty(
            (*like.shape[: self.dim], rows, *like.shape[self.dim + 1 : -1], width)
        )

    def matrix(self, weight: Tensor) -> Tensor:
        """[k, o] of a weight."""
        return weight if self.transposed else weight.t()

    def weight_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        g, rows = gradient.flatten(0, -2), x.flatten(0, -2)
        return rows.t() @ g if self.transposed else g.t() @ rows

    @property
    def shared_group(self) -> str:
        """Where the fused operators work, else empty."""
        return self.mesh.shared_group(self.axis) if self.mesh and self.blocks == 1 else ""

    def pass_on(self, x: Tensor) -> Tensor:
        """x on its way to the next rank."""
        flat = x.reshape(-1)
        return (
            torch.empty_like(flat) if self.mesh is None else self.mesh.start_shift(flat, self.axis)
        )

    def arrived(self, in_flight: Tensor, like: Tensor) -> Tensor:
        flat = in_flight if self.mesh is None else self.mesh.wait(in_flight)
        return flat.view(like.shape)

    def begin(self) -> None:
        """A round begins."""
        if self.mesh is not None:
            self.mesh.begin_ring()

    def come_round(self, x: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(owner, its rows), the own ones first; the next ones are on their way meanwhile."""
        self.begin()
        held = x.contiguous()
        for step in range(self.size):
            in_flight = self.pass_on(held) if step < self.size - 1 else None
            yield (self.coord - step) % self.size, held
            if in_flight is not None:
                held = self.arrived(in_flight, held)

    def go_round(
        self, summand: Callable[[int], Tensor], meanwhile: Callable[[], None] | None = None
    ) -> Tensor:
        """The sum over ranks of this rank's rows. summand: of the rows of a rank; meanwhile: what
        else there is to do while the last sum is on its way."""
        self.begin()
        in_flight: Tensor | None = None
        for step in range(self.size):
            own = summand((self.coord - 1 - step) % self.size)
            if step == self.size - 1 and meanwhile is not None:
                meanwhile()
            total = own if in_flight is None else own.add_(self.arrived(in_flight, own))
            if step < self.size - 1:
                in_flight = self.pass_on(total)
        return total


def all_gather_matmul(
    context: StepContext,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    dim: int,
    blocks: int,
    transposed: bool,
    axis: str,
) -> tuple[Tensor, ...]:
    """Products of the rows of all ranks of `axis` with each of the weights here.

    x [..., rows, ..., k], of which `dim` in `blocks` is sharded; weights [o, k], transposed [k, o];
    biases [o] or None -> [..., all rows, ..., o] each.
    """
    mesh = context.mesh
    ring = _Ring(mesh, axis, mesh.size((axis,)), mesh.coord(axis), dim, blocks, transposed)
    return _gathered(ring, x, weights, biases)


def matmul_reduce_scatter(
    context: StepContext,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dim: int,
    blocks: int,
    transposed: bool,
    axis: str,
) -> Tensor:
    """The sum over the ranks of `axis` of their products, of which each gets its rows.

    x [..., all rows, ..., k], weight [o, k], transposed [k, o], bias [o], a summand as the products
    are -> [..., rows, ..., o], `dim` sharded in `blocks`.
    """
    mesh = context.mesh
    ring = _Ring(mesh, axis, mesh.size((axis,)), mesh.coord(axis), dim, blocks, transposed)
    made: Tensor = _MatmulReduceScatter.apply(ring, x, weight, bias)  # type: ignore[no-untyped-call]
    return made


def _gradients_of_rows(
    ring: _Ring, gradient: Tensor, weight: Tensor, *, of_input: bool, of_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Of a scattered product: (gradient of x, gradients of the results of all ranks), if wanted."""
    matrix = ring.matrix(weight).t()
    if group := ring.shared_group:
        whole, (dx,) = gathered_products(gradient, [matrix], ring.dim, group)
        return dx if of_input else None, whole
    into = ring.empty(gradient, matrix.shape[1]) if of_input else None
    gathered = ring.empty(gradient, gradient.shape[-1]) if of_weight else None
    for owner, rows in ring.come_round(gradient):
        if gathered is not None:
            ring.put(gathered, owner, rows)
        if into is not None:
            ring.put_product(into, owner, rows, matrix)
    return into, gathered


def _unflatten(x: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
    made: Tensor = x.unflatten(dim, sizes)  # type: ignore[no-untyped-call]
    return made


def _gathered(
    ring: _Ring, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    made: tuple[Tensor, ...]
    made = _AllGatherMatmul.apply(ring, len(weights), x, *weights, *biases)  # type: ignore[no-untyped-call]
    return made


class _AllGatherMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ring: _Ring, count: int, x: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        weights, biases = given[:count], given[count:]
        ctx.ring, ctx.count = ring, count
        ctx.set_materialize_grads(False)
        keeps = any(ctx.needs_input_grad[3 : 3 + count])
        if group := ring.shared_group:
            matrices = [ring.matrix(weight) for weight in weights]
            gathered, fused = gathered_products(x, matrices, ring.dim, group)
            ctx.save_for_backward(gathered if keeps else None, *weights)
            pairs = zip(fused, biases, strict=True)
            return tuple(out if bias is None else out + bias for out, bias in pairs)
        widths = [w.shape[1 if ring.transposed else 0] for w in weights]
        made = tuple(ring.empty(x, width) for width in widths)
        whole = ring.empty(x, x.shape[-1]) if keeps else None
        for owner, rows in ring.come_round(x):
            if whole is not None:
                ring.put(whole, owner, rows)
            for out, weight, bias in zip(made, weights, biases, strict=True):
                ring.put_product(out, owner, rows, ring.matrix(weight), bias)
        ctx.save_for_backward(whole, *weights)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        whole, *weights = ctx.saved_tensors
        ring, count, needs = ctx.ring, ctx.count, ctx.needs_input_grad[2:]
        given = [(g, w) for g, w in zip(gradients, weights, strict=True) if g is not None]
        of_weights: list[Tensor | None] = [None] * count
        of_biases: list[Tensor | None] = [None] * count

        def make_weights() -> None:
            for k, gradient in enumerate(gradients):
                if gradient is not None and needs[1 + k]:
                    of_weights[k] = ring.weight_gradient(gradient, whole)
                if gradient is not None and needs[1 + count + k]:
                    of_biases[k] = gradient.flatten(0, -2).sum(0)

        def summand(owner: int) -> Tensor:
            (first, weight), *others = given
            total = ring.part(first, owner) @ ring.matrix(weight).t()
            for gradient, weight in others:
                total += ring.part(gradient, owner) @ ring.matrix(weight).t()
            rows: Tensor = total.flatten(ring.dim, ring.dim + 1)
            return rows

        of_x = None
        if given and needs[0] and not (ring.shared_group and len(given) == 1):
            of_x = ring.go_round(summand, make_weights)
        else:
            make_weights()
            if given and needs[0]:
                ((gradient, weight),) = given
                matrix = ring.matrix(weight).t()
                of_x = scattered_product(gradient, matrix, ring.dim, ring.shared_group)
        return None, None, of_x, *of_weights, *of_biases


class _MatmulReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ring: _Ring, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.ring = ring
        ctx.save_for_backward(x, weight)
        if bias is None and (group := ring.shared_group):
            return scattered_product(x, ring.matrix(weight), ring.dim, group)

        def summand(owner: int) -> Tensor:
            made = functional.linear(ring.part(x, owner), ring.matrix(weight).t(), bias)
            return made.flatten(ring.dim, ring.dim + 1)

        return ring.go_round(summand)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ring, (_, of_input, of_weight, of_bias) = ctx.ring, ctx.needs_input_grad
        dx, whole = _gradients_of_rows(
            ring, gradient, weight, of_input=of_input, of_weight=of_weight or of_bias
        )
        dw = None if whole is None or not of_weight else ring.weight_gradient(whole, x)
        db = None if whole is None or not of_bias else whole.flatten(0, -2).sum(0)
        return None, dx, dw, db


def _probed_gather(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    dim: int,
    places: Sequence[int],
    transposed: bool,
    num_ranks: int,
) -> list[Tensor]:
    """What a probe of memory runs: local tensors, of an axis of `num_ranks`."""
    ring = _Ring(None, "", num_ranks, 0, dim, places[0], transposed)
    return list(_gathered(ring, x, weights, biases))


def _probed_scatter(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dim: int,
    places: Sequence[int],
    transposed: bool,
    num_ranks: int,
) -> Tensor:
    ring = _Ring(None, "", num_ranks, 0, dim, places[0], transposed)
    made: Tensor = _MatmulReduceScatter.apply(ring, x, weight, bias)  # type: ignore[no-untyped-call]
    return made


for _name, _arguments, _result, _function in (
    ("all_gather_matmul", "Tensor[] weights, Tensor?[] biases", "Tensor[]", _probed_gather),
    ("matmul_reduce_scatter", "Tensor weight, Tensor? bias", "Tensor", _probed_scatter),
):
    torch.library.define(
        f"meshfold::{_name}",
        f"(Tensor x, {_arguments}, int dim, int[] places, bool transposed, int num_ranks)"
        f" -> {_result}",
    )
    torch.library.impl(f"meshfold::{_name}", "CompositeImplicitAutograd", _function)
