"""Rules of factorizations, inverses and solutions of matrices: the matrix is unsharded, the dims
before it, which number the matrices, are free."""

from meshfold.ir.op_graph import Value
from meshfold.passes.rules.ops.labels import (
    BoundOp,
    Dims,
    LabelFunction,
    OpLabels,
    broadcast_dims,
    numbered,
    rule,
)

Ranks = tuple[int, ...]


def _batched(inputs: Ranks, outputs: Ranks) -> LabelFunction:
    """inputs, outputs: how many dims, the last ones, of each operand and each result are
    unsharded; those before are labels, of operands broadcast to the most."""

    def labels_of(op: BoundOp) -> OpLabels:
        return _with_ranks(op, inputs, outputs)

    return labels_of


def _with_ranks(op: BoundOp, inputs: Ranks, outputs: Ranks) -> OpLabels:
    full = _without_last(op.outputs[0], outputs[0])
    labels = numbered(full)

    def dims(value: Value, rank: int) -> Dims:
        batch = _without_last(value, rank)
        return (*broadcast_dims(batch, full, labels), *(None,) * (len(value.shape) - len(batch)))

    return OpLabels(
        tuple(map(dims, op.values, inputs)),
        tuple(map(dims, op.outputs, outputs)),
    )


def _without_last(value: Value, count: int) -> tuple[int, ...]:
    return value.shape[: len(value.shape) - count]


def _pseudo_inverse(op: BoundOp) -> OpLabels:
    """pinv: tolerances are numbers, or one per matrix."""
    return _with_ranks(op, (2, *(0,) * (len(op.values) - 1)), (2,))


def _solution(op: BoundOp) -> OpLabels:
    """solve A x = B: B is a matrix, or one vector per matrix."""
    matrix, other = op.values
    is_vector = len(other.shape) == 1 or other.shape == matrix.shape[:-1]
    rank = 1 if is_vector else 2
    return _with_ranks(op, (2, rank), (rank,))


def _cross(op: BoundOp) -> OpLabels:
    """cross: the vectors along `dim`, the last by default, are unsharded."""
    shape = op.outputs[0].shape
    labels = numbered(shape, but=(op.dim("dim", len(shape), -1),))
    inputs = tuple(broadcast_dims(v.shape, shape, labels) for v in op.values)
    return OpLabels(inputs, (labels,), linear=(frozenset({0}), frozenset({1})))


def _solution_and_factors(op: BoundOp) -> OpLabels | None:
    """solve_ex A x = B: the solution, the factors of A, their pivots, and what went wrong."""
    matrix = op.values[0].shape
    if op.outputs[0].shape[: len(matrix) - 2] != matrix[:-2]:
        return None
    of_solution = _solution(op)
    batch = of_solution.inputs[0][:-2]
    factors = ((*batch, None, None), (*batch, None), batch)
    return OpLabels(of_solution.inputs, (*of_solution.outputs, *factors))


LINALG_RULES = {
    "aten.linalg_cholesky.default": rule("self upper", _batched((2,), (2,))),
    "aten.linalg_inv.default": rule("A", _batched((2,), (2,))),
    "aten.linalg_pinv.atol_rtol_tensor": rule("self atol rtol hermitian", _pseudo_inverse),
    "aten.linalg_pinv.atol_rtol_float": rule("self atol rtol hermitian", _pseudo_inverse),
    "aten.linalg_pinv.default": rule("self rcond hermitian", _pseudo_inverse),
    "aten.linalg_matrix_exp.default": rule("self", _batched((2,), (2,))),
    "aten.linalg_matrix_power.default": rule("self n", _batched((2,), (2,))),
    "aten._linalg_det.default": rule("A", _batched((2,), (0, 2, 1))),
    "aten._linalg_slogdet.default": rule("A", _batched((2,), (0, 0, 2, 1))),
    "aten.linalg_qr.default": rule("A mode", _batched((2,), (2, 2))),
    "aten._linalg_svd.default": rule(
        "A full_matrices compute_uv driver", _batched((2,), (2, 1, 2))
    ),
    "aten._linalg_eigh.default": rule("A UPLO compute_v", _batched((2,), (1, 2))),
    "aten.linalg_solve.default": rule("A B left", _solution),
    "aten._linalg_solve_ex.default": rule("A B left check_errors", _solution_and_factors),
    "aten.linalg_householder_product.default": rule("input tau", _batched((2, 1), (2,))),
    "aten.linalg_solve_triangular.default": rule(
        "self B upper left unitriangular", _batched((2, 2), (2,))
    ),
    "aten.cholesky_solve.default": rule("self input2 upper", _batched((2, 2), (2,))),
    "aten.linalg_cross.default": rule("self other dim", _cross),
}
