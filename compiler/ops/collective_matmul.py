"""Collective matmul: products that overlap with the gather of their rows, or with the
reduce-scatter of their sums, shard by shard (Wang et al., Overlap Communication with Dependent
Computation via Decomposition, ASPLOS 2023; Chang et al., FLUX, 2024).

On an axis of n ranks, each with its shard of the rows and of the weights:

    all_gather_matmul      every rank multiplies the rows that it has, its own first, and meanwhile
                           passes them on. Rows are unsharded in the results. The gradient of x is
                           computed as matmul_reduce_scatter's forward
    matmul_reduce_scatter  sums of rows go round; every rank adds its summand while the one before
                           is in flight, and its own rows come last. The gradient of x is computed
                           as all_gather_matmul's forward

Where ranks read each other's memory, torch's fused operators do the same without passes
(meshfold.torch_compat.symmetric_memory), in the cases that they have: one block, no bias in a sum,
and backward one product.

Gradients of weights are one product of full rows each, for which all_gather_matmul saves the
gathered rows. Collectives are the same on all ranks; the order of the rows that arrive is not."""

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
class _RowShards:
    """The rows of one op on one rank. mesh: None for a probe of memory, to which nothing comes;
    dim, blocks: of the rows, as in the type Shard(dim, blocks), counted in the local tensor
    (spmd.local_blocks)."""

    mesh: RankMesh | None
    axis: str
    size: int
    coord: int
    dim: int
    blocks: int
    transposed: bool

    def shard(self, full: Tensor, owner: int) -> Tensor:
        """A view of the rows of a rank: [..., blocks, rows, ...]."""
        return _unflatten(full, self.dim, (self.blocks, self.size, -1)).select(self.dim + 1, owner)

    def put(self, full: Tensor, owner: int, rows: Tensor) -> None:
        self.shard(full, owner).copy_(_unflatten(rows, self.dim, (self.blocks, -1)))

    def put_product(
        self, full: Tensor, owner: int, rows: Tensor, matrix: Tensor, bias: Tensor | None = None
    ) -> None:
        """Write rows [..., k] @ matrix [k, o] into their shard, by the kernel itself where they
        are contiguous, in all or per sample."""
        target = self.shard(full, owner)
        if target.is_contiguous():
            torch.mm(rows.flatten(0, -2), matrix, out=target.view(-1, matrix.shape[1]))
        elif target.dim() == 4 and self.blocks == self.dim == 1:
            samples = matrix.expand(rows.shape[0], *matrix.shape)
            torch.bmm(rows, samples, out=target.squeeze(1))
        else:
            self.put(full, owner, rows @ matrix)
        if bias is not None:
            target += bias

    def empty(self, like: Tensor, width: int) -> Tensor:
        """An empty tensor for the rows of all ranks, of another width than those of one."""
        rows = like.shape[self.dim] * self.size
        return like.new_empty(
            (*like.shape[: self.dim], rows, *like.shape[self.dim + 1 : -1], width)
        )

    def matrix(self, weight: Tensor) -> Tensor:
        """The weight as [k, o]."""
        return weight if self.transposed else weight.t()

    def matrix_back(self, weight: Tensor) -> Tensor:
        """What the gradient of the result is multiplied with: of complex weights the conjugate."""
        return self.matrix(weight).t().conj()

    def weight_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        g, rows = gradient.flatten(0, -2), x.flatten(0, -2).conj()
        return rows.t() @ g if self.transposed else g.t() @ rows

    @property
    def shared_group(self) -> str:
        """The group on which the fused operators work, else empty."""
        return self.mesh.shared_group(self.axis) if self.mesh and self.blocks == 1 else ""

    def pass_on(self, x: Tensor) -> Tensor:
        """Start to send x to the next rank."""
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

    def all_gathered(self, x: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(owner, its rows), the own ones first; the next ones are in flight meanwhile."""
        self.begin()
        rows = x.contiguous()
        for step in range(self.size):
            in_flight = self.pass_on(rows) if step < self.size - 1 else None
            yield (self.coord - step) % self.size, rows
            if in_flight is not None:
                rows = self.arrived(in_flight, rows)

    def reduce_scattered(
        self, summand: Callable[[int], Tensor], meanwhile: Callable[[], None] | None = None
    ) -> Tensor:
        """The sum over ranks of this rank's rows. summand: of the rows of a rank; meanwhile: what
        else there is to do while the last sum is in flight."""
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
    shards = _RowShards(mesh, axis, mesh.size((axis,)), mesh.coord(axis), dim, blocks, transposed)
    return _gathered(shards, x, weights, biases)


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
    """The sum over the ranks of `axis` of their products, every rank with its own rows.

    x [..., all rows, ..., k], weight [o, k], transposed [k, o], bias [o], a summand as the products
    are -> [..., rows, ..., o], `dim` sharded in `blocks`.
    """
    mesh = context.mesh
    shards = _RowShards(mesh, axis, mesh.size((axis,)), mesh.coord(axis), dim, blocks, transposed)
    return _scattered(shards, x, weight, bias)


def _gradients_of_rows(
    shards: _RowShards, gradient: Tensor, weight: Tensor, *, of_input: bool, of_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """(gradient of x, gradients of the results of all ranks) of a scattered product, if wanted."""
    matrix = shards.matrix_back(weight)
    if group := shards.shared_group:
        full, (dx,) = gathered_products(gradient, [matrix], shards.dim, group)
        return dx if of_input else None, full
    into = shards.empty(gradient, matrix.shape[1]) if of_input else None
    gathered = shards.empty(gradient, gradient.shape[-1]) if of_weight else None
    for owner, rows in shards.all_gathered(gradient):
        if gathered is not None:
            shards.put(gathered, owner, rows)
        if into is not None:
            shards.put_product(into, owner, rows, matrix)
    return into, gathered


def _unflatten(x: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
    out: Tensor = x.unflatten(dim, sizes)  # type: ignore[no-untyped-call]
    return out


def _gathered(
    shards: _RowShards, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    outs: tuple[Tensor, ...]
    outs = _AllGatherMatmul.apply(shards, len(weights), x, *weights, *biases)  # type: ignore[no-untyped-call]
    return outs


def _scattered(shards: _RowShards, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = _MatmulReduceScatter.apply(shards, x, weight, bias)  # type: ignore[no-untyped-call]
    return out


class _AllGatherMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, shards: _RowShards, count: int, x: Tensor, *given: Tensor
    ) -> tuple[Tensor, ...]:
        weights, biases = given[:count], given[count:]
        ctx.shards, ctx.count = shards, count
        ctx.set_materialize_grads(False)
        saves = any(ctx.needs_input_grad[3 : 3 + count])
        if group := shards.shared_group:
            matrices = [shards.matrix(weight) for weight in weights]
            gathered, fused = gathered_products(x, matrices, shards.dim, group)
            ctx.save_for_backward(gathered if saves else None, *weights)
            pairs = zip(fused, biases, strict=True)
            return tuple(out if bias is None else out + bias for out, bias in pairs)
        widths = [w.shape[1 if shards.transposed else 0] for w in weights]
        outs = tuple(shards.empty(x, width) for width in widths)
        full = shards.empty(x, x.shape[-1]) if saves else None
        for owner, rows in shards.all_gathered(x):
            if full is not None:
                shards.put(full, owner, rows)
            for out, weight, bias in zip(outs, weights, biases, strict=True):
                shards.put_product(out, owner, rows, shards.matrix(weight), bias)
        ctx.save_for_backward(full, *weights)
        return outs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        full, *weights = ctx.saved_tensors
        shards, count, needs = ctx.shards, ctx.count, ctx.needs_input_grad[2:]
        given = [(g, w) for g, w in zip(gradients, weights, strict=True) if g is not None]
        of_weights: list[Tensor | None] = [None] * count
        of_biases: list[Tensor | None] = [None] * count

        def weight_gradients() -> None:
            for k, gradient in enumerate(gradients):
                if gradient is not None and needs[1 + k]:
                    of_weights[k] = shards.weight_gradient(gradient, full)
                if gradient is not None and needs[1 + count + k]:
                    of_biases[k] = gradient.flatten(0, -2).sum(0)

        def summand(owner: int) -> Tensor:
            (first, weight), *others = given
            total = shards.shard(first, owner) @ shards.matrix_back(weight)
            for gradient, weight in others:
                total += shards.shard(gradient, owner) @ shards.matrix_back(weight)
            rows: Tensor = total.flatten(shards.dim, shards.dim + 1)
            return rows

        of_x = None
        if given and needs[0] and not (shards.shared_group and len(given) == 1):
            of_x = shards.reduce_scattered(summand, weight_gradients)
        else:
            weight_gradients()
            if given and needs[0]:
                ((gradient, weight),) = given
                matrix = shards.matrix_back(weight)
                of_x = scattered_product(gradient, matrix, shards.dim, shards.shared_group)
        return None, None, of_x, *of_weights, *of_biases


class _MatmulReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, shards: _RowShards, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.shards = shards
        ctx.save_for_backward(x, weight)
        if bias is None and (group := shards.shared_group):
            return scattered_product(x, shards.matrix(weight), shards.dim, group)

        def summand_of(owner: int) -> Tensor:
            summand = functional.linear(shards.shard(x, owner), shards.matrix(weight).t(), bias)
            return summand.flatten(shards.dim, shards.dim + 1)

        return shards.reduce_scattered(summand_of)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        shards, (_, of_input, of_weight, of_bias) = ctx.shards, ctx.needs_input_grad
        dx, full = _gradients_of_rows(
            shards, gradient, weight, of_input=of_input, of_weight=of_weight or of_bias
        )
        dw = None if full is None or not of_weight else shards.weight_gradient(full, x)
        db = None if full is None or not of_bias else full.flatten(0, -2).sum(0)
        return None, dx, dw, db


def _probed_gather(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    dim: int,
    blocks: Sequence[int],
    transposed: bool,
    num_ranks: int,
) -> list[Tensor]:
    """What a probe of memory runs: local tensors, of an axis of `num_ranks`."""
    shards = _RowShards(None, "", num_ranks, 0, dim, blocks[0], transposed)
    return list(_gathered(shards, x, weights, biases))


def _probed_scatter(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dim: int,
    blocks: Sequence[int],
    transposed: bool,
    num_ranks: int,
) -> Tensor:
    shards = _RowShards(None, "", num_ranks, 0, dim, blocks[0], transposed)
    return _scattered(shards, x, weight, bias)


for _name, _arguments, _result, _function in (
    ("all_gather_matmul", "Tensor[] weights, Tensor?[] biases", "Tensor[]", _probed_gather),
    ("matmul_reduce_scatter", "Tensor weight, Tensor? bias", "Tensor", _probed_scatter),
):
    torch.library.define(
        f"meshfold::{_name}",
        f"(Tensor x, {_arguments}, int dim, int[] blocks, bool transposed, int num_ranks)"
        f" -> {_result}",
    )
    torch.library.impl(f"meshfold::{_name}", "CompositeImplicitAutograd", _function)
