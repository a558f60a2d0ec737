"""Which dims of complex numbers and Fourier transforms may be sharded. That each rule is right is
tested with all others, in tests/passes/rules/test_table.py."""

from typing import Any

import pytest
from support.graphs.complex_samples import complex_of
from support.graphs.ops import SingleOp
from support.graphs.tensors import real

from meshfold.ir.spmd import PARTIAL


def sharded_dims(op: SingleOp) -> set[int]:
    """Dims of the operand that some rule shards."""
    return {rule.inputs[0].dim for rule in op.axis_rules(2) if rule.inputs[0].is_shard}


@pytest.mark.parametrize(
    ("name", "arguments", "transformed"),
    [
        ("fft", (), {2}),
        ("fft", (None, 0), {0}),
        ("rfft", (6, -2), {1}),
        ("fft2", (), {1, 2}),
        ("fft2", (None, [0, 2]), {0, 2}),
        ("fftn", (), {0, 1, 2}),
        ("fftn", ([4],), {2}),
        ("rfftn", (None, [0]), {0}),
    ],
)
def test_a_transform_needs_its_dims_unsharded(
    name: str, arguments: tuple[Any, ...], transformed: set[int]
) -> None:
    op = SingleOp(f"aten.fft_{name}.default", real(4, 12, 8), *arguments)
    assert sharded_dims(op) == {0, 1, 2} - transformed


def test_the_two_parts_of_a_number_stay_together() -> None:
    assert sharded_dims(SingleOp("aten.view_as_complex.default", real(4, 12, 2))) == {0, 1}
    parted = SingleOp("aten.view_as_real.default", complex_of(4, 12))
    assert {r.outputs[0].dim for r in parted.axis_rules(2) if r.outputs[0].is_shard} == {0, 1}


def test_a_pending_sum_stays_one_through_what_is_linear() -> None:
    for target, is_linear in (("complex", True), ("polar", False)):
        op = SingleOp(f"aten.{target}.default", real(4, 12), real(4, 12, seed=8))
        assert is_linear == any(r.outputs == (PARTIAL,) for r in op.axis_rules(2))
