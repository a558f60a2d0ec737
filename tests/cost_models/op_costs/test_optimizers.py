"""What optimizers keep, make and move for a parameter: by hand, and held against torch's own."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfold.cost_models.op_costs.optimizers import (
    CHUNK_NUMBERS,
    Update,
    has_states,
    least_share,
    update_of,
)
from meshfold.ir.optimizers import OPTIMIZERS

N = 1000 * 512


@pytest.mark.parametrize(
    ("optimizer", "states", "together", "largest", "moved"),
    [
        ("sgd", 0, 0, 0, 12 * N),
        ("momentum", 4 * N, 0, 0, 20 * N),
        ("adamw", 8 * N, 4 * N, 0, 28 * N),
        ("adamw_fused", 8 * N, 0, 0, 28 * N),
        ("adamw_bf16", 4 * N, 0, 16 * N, 220 * N),
        # 2,000 blocks of 256 numbers, each with a float32.
        ("adamw_8bit", 2 * N + 2 * 2000 * 4, 0, 16 * N, 124 * N),
        ("adafactor", (1000 + 512) * 4, 0, 8 * N, 68 * N),
        ("muon", 4 * N, 0, 8 * N + 4 * 512**2, 94 * N + 50 * 512**2),
    ],
)
def test_a_matrix_of_1000_x_512_in_float32(
    optimizer: str, states: int, together: int, largest: int, moved: int
) -> None:
    found = update_of(optimizer, (1000, 512), 4 * N, 4)
    assert (found.state_bytes, found.together_bytes) == (states, together)
    assert (found.largest_bytes, found.moved_bytes) == (largest, moved)
    # Foreach ops divide by three scalars of 4 bytes.
    assert found.step_bytes == together + largest + (12 if together else 0)


@pytest.mark.parametrize(
    ("optimizer", "states"),
    [("sgd", 0), ("momentum", 600), ("adamw", 1200), ("adamw_bf16", 1200), ("adafactor", 600)]
    # 300 numbers are two blocks; Muon leaves vectors to AdamW.
    + [("adamw_8bit", 2 * (300 + 8)), ("muon", 1200)],
)
def test_a_vector_of_300_in_bfloat16(optimizer: str, states: int) -> None:
    assert update_of(optimizer, (300,), 600, 2).state_bytes == states


def test_adafactor_factors_the_last_two_dims() -> None:
    found = update_of("adafactor", (8, 64, 32), 4 * 8 * 64 * 32, 4)
    assert found.state_bytes == 4 * (8 * 64 + 8 * 32)


def test_the_products_of_muon() -> None:
    """X X', its square and the product with X, five times, of the smaller side."""
    gram, square, product = 2 * 64 * 64 * 96, 2 * 64**3, 2 * 64 * 64 * 96
    for shape in ((64, 96), (96, 64)):
        assert update_of("muon", shape, 4 * 64 * 96, 4).flops == 5 * (gram + square + product)


def test_low_precision_is_unpacked_chunk_by_chunk() -> None:
    large = update_of("adamw_8bit", (10 * CHUNK_NUMBERS,), 40 * CHUNK_NUMBERS, 4)
    assert large.largest_bytes == 16 * CHUNK_NUMBERS


def test_parameters_add_up_but_for_the_largest() -> None:
    first, second = Update(1, 2, 30, 4, 5), Update(10, 20, 3, 40, 50)
    assert first + second == Update(11, 22, 30, 44, 55)
    assert first.times(3) == Update(3, 6, 30, 12, 15)
    assert first.times(0) == Update()
    assert [name for name in OPTIMIZERS if not has_states(name)] == ["sgd"]


@given(
    st.sampled_from(OPTIMIZERS),
    st.lists(st.integers(0, 40), min_size=1, max_size=3),
    st.sampled_from([2, 4, 8]),
)
def test_the_least_share_is_no_more_than_that_of_any_parameter(
    optimizer: str, shape: list[int], item_bytes: int
) -> None:
    num_bytes = math.prod(shape) * item_bytes
    found = update_of(optimizer, shape, num_bytes, item_bytes)
    kept = found.state_bytes + found.together_bytes
    assert least_share(optimizer) * num_bytes <= kept
    assert (found == Update()) == (num_bytes == 0)
