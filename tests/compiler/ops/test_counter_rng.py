"""The counter-based generator: same everywhere, fair, and different where it must be."""

import math

import pytest
import torch

from meshfold.ops.counter_rng import keep_mask, normal_numbers, stream_key, uniform_numbers

INDEX = torch.arange(200_000)
SIZE = len(INDEX)


def test_it_keeps_the_wanted_fraction() -> None:
    key = stream_key(seed=3, step=7, instance=2, op=5)
    for probability in (0.0, 0.1, 0.5, 0.9, 1.0):
        fraction = keep_mask(INDEX, key, probability, SIZE).double().mean().item()
        assert abs(fraction - probability) < 0.005


def test_an_element_does_not_depend_on_the_others() -> None:
    key = stream_key(0, 0, 0, 0)
    assert keep_mask(INDEX[1000:1100], key, 0.5, SIZE).equal(
        keep_mask(INDEX, key, 0.5, SIZE)[1000:1100]
    )


def test_seed_step_instance_and_op_give_independent_masks() -> None:
    first = keep_mask(INDEX, stream_key(0, 0, 0, 0), 0.5, SIZE)
    for changed in ((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (2**32, 0, 0, 0)):
        agree = (first == keep_mask(INDEX, stream_key(*changed), 0.5, SIZE)).double().mean().item()
        assert abs(agree - 0.5) < 0.01, changed


def test_neighbours_and_far_indices_are_independent() -> None:
    key = stream_key(0, 1, 2, 3)
    mask = keep_mask(INDEX, key, 0.5, SIZE)
    for distance in (1, 2, 64, 4096):
        agree = (mask[distance:] == mask[:-distance]).double().mean().item()
        assert abs(agree - 0.5) < 0.01
    beyond_32_bits = keep_mask(INDEX + 2**32, key, 0.5, 2**33)
    assert abs((mask == beyond_32_bits).double().mean().item() - 0.5) < 0.01


def test_the_numbers_stay_what_they_are() -> None:
    """Masks are part of a run's result: a change of the hash is a change for users."""
    bits = keep_mask(torch.arange(16), stream_key(1, 2, 3, 4), 0.5, SIZE).int().tolist()
    assert bits == [0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]


def test_small_tensors_have_the_numbers_of_large_ones() -> None:
    """Of which the upper half of an index is hashed as well."""
    index = torch.cat([INDEX, 2**32 - 1 - INDEX])
    small, large = (uniform_numbers(index, 5, torch.float64, size) for size in (2**32, 2**33))
    assert torch.equal(small, large)


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_uniform_numbers_are_spread_evenly_below_one(dtype: torch.dtype) -> None:
    found = uniform_numbers(INDEX, stream_key(3, 7, 2, 5), dtype, SIZE)
    assert found.dtype == dtype and found.min() >= 0 and found.max() < 1
    numbers = found.double() + torch.finfo(dtype).eps / 4  # they are rounded down
    assert abs(numbers.mean().item() - 0.5) < 0.003
    assert abs(numbers.var().item() - 1 / 12) < 0.001
    counts = torch.histc(numbers, bins=16, min=0, max=1) / len(INDEX)
    assert (counts - 1 / 16).abs().max() < 0.003
    assert abs(torch.corrcoef(torch.stack([numbers[1:], numbers[:-1]]))[0, 1].item()) < 0.01


@pytest.mark.parametrize("dtype", DTYPES)
def test_normal_numbers_have_the_moments_and_tails_of_a_normal(dtype: torch.dtype) -> None:
    found = normal_numbers(INDEX, stream_key(3, 7, 2, 5), dtype, SIZE)
    assert found.dtype == dtype and found.isfinite().all()
    x = found.double()
    for power, moment in enumerate((0.0, 1.0, 0.0, 3.0), start=1):
        # Four standard errors; the variance of a fourth power is 96.
        assert abs((x**power).mean().item() - moment) < 4 * math.sqrt(96 / len(x))
    for bound in (0.5, 1.0, 2.0, 3.0):
        expected = math.erfc(bound / math.sqrt(2))
        assert abs((x.abs() > bound).double().mean().item() - expected) < 0.004
    assert abs(torch.corrcoef(torch.stack([x[1:], x[:-1]]))[0, 1].item()) < 0.01


def test_uniform_numbers_of_two_dtypes_agree_as_far_as_both_go() -> None:
    wide, narrow = (uniform_numbers(INDEX, 5, d, SIZE) for d in (torch.float64, torch.float32))
    assert (wide - narrow.double()).abs().max() < 2**-24
