"""Numbers in 8 and in 16 bits: every code by hand, errors within their bounds, no bias."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshfold.low_precision.packing import MOST_ERROR, Code, of_codes, to_bfloat16, to_codes

CPU = torch.device("cpu")
CODES = {is_signed: Code.of(CPU, is_signed=is_signed) for is_signed in (True, False)}


def through(x: torch.Tensor, is_signed: bool) -> torch.Tensor:
    """Numbers packed and unpacked."""
    code = CODES[is_signed]
    return of_codes(*to_codes(x, code), code, x.dtype)


@pytest.mark.parametrize("is_signed", [True, False])
def test_the_codes_are_256_numbers_over_seven_decades(is_signed: bool) -> None:
    values = CODES[is_signed].values
    assert values.unique().numel() == 256
    assert values[-1] == 1 and (values == 0).sum() == 1
    # Decade 0 has one step, or two; its middles times a millionth.
    smallest = values[values > 0][0].item()
    assert smallest == pytest.approx(0.55e-6 if is_signed else 0.325e-6)
    # The uppermost decade: 64 steps, or 128, of 0.9 / 64 or 0.9 / 128.
    assert (values[-2] - values[-3]).item() == pytest.approx(
        0.9 / (64 if is_signed else 128), rel=1e-4
    )


@pytest.mark.parametrize("is_signed", [True, False])
def test_what_a_code_stands_for_comes_back_as_it_is(is_signed: bool) -> None:
    values = CODES[is_signed].values * 3.0
    assert torch.equal(through(values, is_signed), values)
    # Twice is once.
    numbers = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    once = through(numbers if is_signed else numbers.abs(), is_signed)
    assert torch.equal(through(once, is_signed), once)


@given(
    st.booleans(),
    st.lists(st.floats(-(2.0**99), 2.0**99, width=32), max_size=600),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_a_number_is_off_by_no_more_than_the_bound(
    is_signed: bool, numbers: list[float], dtype: torch.dtype
) -> None:
    x = torch.tensor(numbers, dtype=dtype)
    x = x if is_signed else x.abs()
    found = through(x, is_signed)
    assert found.shape == x.shape and found.dtype == dtype
    slack = 2**-8 if dtype == torch.bfloat16 else 1e-6
    for a, b in zip(x.double().split(256), found.double().split(256), strict=True):
        largest = a.abs().max() if a.numel() else torch.zeros(())
        # Denormal scales are beyond the relative bound.
        assert ((a - b).abs() <= (MOST_ERROR[is_signed] + slack) * largest + 1e-37).all()


def test_blocks_are_of_256_numbers_and_do_not_touch_each_other() -> None:
    x = torch.cat([torch.full((256,), 1e-8), torch.ones(44)])
    codes, largest = to_codes(x, CODES[True])
    assert codes.dtype == torch.uint8 and codes.numel() == 300
    assert largest.tolist() == pytest.approx([1e-8, 1.0])
    assert torch.equal(through(x, True), x)


def test_a_second_moment_is_zero_only_if_it_was() -> None:
    x = torch.tensor([1.0, 1e-12, 0.0])
    assert (through(x, False) > 0).tolist() == [True, True, False]
    assert through(torch.zeros(5), False).tolist() == [0.0] * 5


def test_what_is_not_finite_is_not_hidden() -> None:
    for wrong in (torch.inf, torch.nan):
        assert not through(torch.tensor([1.0, wrong]), True).isfinite().all()


def test_bfloat16_goes_to_one_of_the_two_neighbours() -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    found = to_bfloat16(x, torch.tensor(3.0)).float()
    below = (x.view(torch.int32) & -0x10000).view(torch.float32)
    above = ((x.view(torch.int32) & -0x10000) + 0x10000).view(torch.float32)
    assert ((found == below) | (found == above)).all()
    exact = below.bfloat16()
    assert torch.equal(to_bfloat16(below, torch.tensor(5.0)), exact)


def test_bfloat16_is_right_in_the_mean_and_goes_by_the_number_alone() -> None:
    x = torch.full((1,), 1 + 0.3 * 2**-7)
    drawn = torch.stack([to_bfloat16(x, torch.tensor(float(k))).float() for k in range(2000)])
    # Up in 30 % of the steps: within five standard deviations.
    assert ((drawn > 1).double().mean() - 0.3).abs() < 5 * (0.21 / 2000) ** 0.5
    many = torch.randn(1000)
    whole = to_bfloat16(many, torch.tensor(7.0))
    halves = [to_bfloat16(half, torch.tensor(7.0)) for half in many.split(500)]
    assert torch.equal(whole, torch.cat(halves))


def test_an_average_that_plain_rounding_stops_goes_on() -> None:
    """beta 0.999 of a second moment without gradients: after 1000 steps 0.37 of it."""
    first = torch.linspace(1, 2, 50).bfloat16()
    rounded = drawn = first
    for k in range(1000):
        rounded = (rounded.float() * 0.999).bfloat16()
        drawn = to_bfloat16(drawn.float() * 0.999, torch.tensor(float(k)))
    assert torch.equal(rounded, first)
    left = drawn.float().mean() / first.float().mean()
    assert left.item() == pytest.approx(0.999**1000, rel=0.1)
