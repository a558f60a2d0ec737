"""Which dims of matrices by the dozen may be sharded. That each rule is right is tested with all
others, in tests/passes/rules/test_table.py."""

from typing import Any

import pytest
from support.graphs.ops import SingleOp
from support.graphs.tensors import real, whole

MATRICES = (2.0 * real(4, 12, 6, 6).detach()).requires_grad_()


def sharded_dims(op: SingleOp) -> list[set[int]]:
    """Per operand the dims that some rule shards."""
    rules = op.axis_rules(2)
    return [
        {t.dim for t in types if t.is_shard}
        for types in zip(*(r.inputs for r in rules), strict=True)
    ]


@pytest.mark.parametrize(
    ("name", "others", "expected"),
    [
        ("linalg_inv.default", (), [{0, 1}]),
        ("linalg_pinv.atol_rtol_tensor", (), [{0, 1}]),
        ("_linalg_slogdet.default", (), [{0, 1}]),
        ("linalg_solve.default", (real(4, 12, 6, 8),), [{0, 1}, {0, 1}]),
        ("linalg_solve.default", (real(4, 12, 6),), [{0, 1}, {0, 1}]),
        ("linalg_solve.default", (real(6),), [{0, 1}, set()]),
        ("cholesky_solve.default", (real(12, 6, 6),), [{0, 1}, {0}]),
        ("renorm.default", (2, 1, 0.5), [{1}]),
        ("rot90.default", (1, [1, 2]), [{0, 3}]),
        ("mode.default", (), [{0, 1, 2}]),
        ("quantile.scalar", (0.5,), [set()]),
        ("quantile.scalar", (0.5, 1), [{0, 2, 3}]),
    ],
)
def test_the_dims_before_a_matrix_are_free(
    name: str, others: tuple[Any, ...], expected: list[set[int]]
) -> None:
    assert sharded_dims(SingleOp(f"aten.{name}", MATRICES, *others)) == expected


def test_one_row_of_boundaries_is_for_all_and_rows_of_them_go_with_their_values() -> None:
    values = real(4, 12, 6, grad=False)
    for boundaries, expected in (
        (real(8, grad=False), set()),
        (real(4, 12, 8, grad=False), {0, 1}),
    ):
        op = SingleOp("aten.searchsorted.Tensor", boundaries, values)
        assert sharded_dims(op) == [expected, {0, 1, 2}]
    order = whole(8, 4, 12, 8)
    sorted_by = SingleOp("aten.searchsorted.Tensor", real(4, 12, 8), values, sorter=order)
    assert [rule.name for rule in sorted_by.axis_rules(2)] == ["I"]


def test_a_factor_of_a_cross_product_may_be_for_all() -> None:
    op = SingleOp("aten.linalg_cross.default", real(4, 12, 3), real(1, 12, 3))
    assert sharded_dims(op) == [{0, 1}, {1}]


def test_a_diagonal_of_an_einsum_is_unsharded() -> None:
    op = SingleOp("aten.einsum.default", "bij,bkk->ji", [real(4, 12, 24), real(4, 6, 6)])
    assert sharded_dims(op) == [{0, 1, 2}, {0}]


def test_samples_of_one_image_are_not_cut_by_its_channels() -> None:
    image, samples = real(12, 6, 6), real(1, 12, 2, grad=False)
    op = SingleOp("aten.fractional_max_pool2d.default", image, [2, 2], [3, 3], samples)
    assert [rule.name for rule in op.axis_rules(2)] == ["I"]
