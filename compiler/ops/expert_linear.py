"""The op meshfold::expert_linear: a product of every row with the weights of its own expert.

    out[t] = w[ids[t]] @ x[t] + bias[ids[t]]

No row is dropped, whatever the routing: rows are taken expert by expert, one GEMM each, so weights
are never gathered per row. Backward (g: gradient of out, rows of expert e in order):

    dx[t] = g[t] @ w[ids[t]]      dw[e] = sum over its rows of g[t] outer x[t]      db[e] = sum g[t]

It saves x, w and ids, and finds the rows of each expert again. An id that no expert has gives a row
of zeros: a rank that has some experts runs the same op on all rows
(meshfold.ops.local_implementations).

Both directions are torch ops, with shapes that do not depend on the routing, so that a graph can
name them and a probe can run them on tensors without storage. Importing this defines them.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("meshfold::expert_linear", mutates_args=())
def expert_linear(
    x: Tensor,
    weight: Tensor,
    ids: Tensor,
    bias: Tensor | None = None,
    transposed: bool = False,
) -> Tensor:
    """x [t, k], weight [e, o, k] (transposed: [e, k, o]), ids [t] int64 from 0 to e, bias [e, o]
    -> [t, o]. A row with id e belongs to no expert and comes out as zeros."""
    out = x.new_zeros((x.shape[0], _width(weight, transposed)))
    for expert, rows in _rows_by_expert(ids, weight.shape[0]):
        product = x[rows] @ _matrix(weight, expert, transposed)
        out[rows] = product if bias is None else product + bias[expert]
    return out


@expert_linear.register_fake
def _expert_linear_shape(
    x: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None = None, transposed: bool = False
) -> Tensor:
    return x.new_empty((x.shape[0], _width(weight, transposed)))


@torch.library.custom_op("meshfold::expert_linear_backward", mutates_args=())
def expert_linear_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, ids: Tensor, transposed: bool, wanted: list[bool]
) -> list[Tensor]:
    """Gradients of x, weight and bias, those that are `wanted`."""
    gradients = _empty_gradients(gradient, x, weight, wanted)
    for gradient_of in gradients:
        gradient_of.zero_()
    found = iter(gradients)
    dx, dw, db = (next(found) if is_wanted else None for is_wanted in wanted)
    for expert, rows in _rows_by_expert(ids, weight.shape[0]):
        g = gradient[rows]
        if dx is not None:
            dx[rows] = g @ _matrix(weight, expert, transposed).T.conj()
        if dw is not None:
            back = x[rows].conj()
            left, right = (back, g) if transposed else (g, back)
            torch.mm(left.T, right, out=dw[expert])
        if db is not None:
            torch.sum(g, 0, out=db[expert])
    return gradients


def weight_gradient(
    gradient: Tensor,
    x: Tensor,
    shape: torch.Size,
    ids: Tensor,
    transposed: bool,
    into: Tensor | None = None,
) -> Tensor:
    """dw alone, of weights of `shape`, for what needs no graph of it; added to `into`, if given."""
    dw = gradient.new_empty(shape) if into is None else into
    left_out = set(range(shape[0] if into is None else 0))
    for expert, rows in _rows_by_expert(ids, shape[0]):
        g = gradient[rows]
        back = x[rows].conj()
        left, right = (back, g) if transposed else (g, back)
        # In place: a product of its own would be as large as the weights of an expert.
        if into is None:
            torch.mm(left.T, right, out=dw[expert])
        else:
            dw[expert].addmm_(left.T, right)
        left_out.discard(expert)
    for expert in left_out:
        dw[expert].zero_()
    return dw


@expert_linear_backward.register_fake
def _empty_gradients_of(
    gradient: Tensor, x: Tensor, weight: Tensor, ids: Tensor, transposed: bool, wanted: list[bool]
) -> list[Tensor]:
    return _empty_gradients(gradient, x, weight, wanted)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ids, bias, transposed = inputs
    ctx.save_for_backward(x, weight, ids)
    ctx.transposed, ctx.has_bias = transposed, bias is not None


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, ids = ctx.saved_tensors
    needs = ctx.needs_input_grad
    wanted = [needs[0], needs[1], ctx.has_bias and needs[3]]
    found = iter(expert_linear_backward(gradient, x, weight, ids, ctx.transposed, wanted))
    dx, dw, db = (next(found) if is_wanted else None for is_wanted in wanted)
    return dx, dw, None, db, None


expert_linear.register_autograd(_backward, setup_context=_keep)


def expert_linear_scratch_bytes(
    x: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None = None
) -> tuple[int, int]:
    """The most that the op may hold inside, forward and backward, whatever the routing: all rows
    may be those of one expert. Their order, its rows of x, and its product or its rows of the
    gradient; with a bias the product twice."""
    num_rows, columns = x.shape
    (width,) = set(weight.shape[1:]) - {columns} or {columns}
    order_bytes = num_rows * ids.element_size()
    both = num_rows * (columns + width) * x.element_size() + order_bytes
    summed = 2 * num_rows * width * x.element_size() + order_bytes
    return (both if bias is None else max(both, summed)), both


def _rows_by_expert(ids: Tensor, num_experts: int) -> Iterator[tuple[int, Tensor]]:
    """(expert, its rows in order) of every expert that has any."""
    order = ids.argsort(stable=True)
    counts = torch.bincount(ids, minlength=num_experts + 1).tolist()
    for expert, rows in enumerate(torch.split(order, counts)[:num_experts]):
        if len(rows):
            yield expert, rows


def _width(weight: Tensor, transposed: bool) -> int:
    return weight.shape[2 if transposed else 1]


def _matrix(weight: Tensor, expert: int, transposed: bool) -> Tensor:
    """[k, o] of one expert."""
    return weight[expert] if transposed else weight[expert].T


def _empty_gradients(
    gradient: Tensor, x: Tensor, weight: Tensor, wanted: list[bool]
) -> list[Tensor]:
    shapes = (tuple(x.shape), tuple(weight.shape), (weight.shape[0], gradient.shape[1]))
    pairs = zip(shapes, wanted, strict=True)
    return [gradient.new_empty(shape) for shape, is_wanted in pairs if is_wanted]
