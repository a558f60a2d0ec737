"""The counter-based generator: same everywhere, fair, and different where it must be."""

import torch

from meshfold.ops.counter_rng import keep_mask, stream_key

INDEX = torch.arange(200_000)


def test_it_keeps_the_wanted_fraction() -> None:
    key = stream_key(seed=3, step=7, instance=2, op=5)
    for probability in (0.0, 0.1, 0.5, 0.9, 1.0):
        fraction = keep_mask(INDEX, key, probability).double().mean().item()
        assert abs(fraction - probability) < 0.005


def test_an_element_does_not_depend_on_the_others() -> None:
    key = stream_key(0, 0, 0, 0)
    assert keep_mask(INDEX[1000:1100], key, 0.5).equal(keep_mask(INDEX, key, 0.5)[1000:1100])


def test_seed_step_instance_and_op_give_independent_masks() -> None:
    first = keep_mask(INDEX, stream_key(0, 0, 0, 0), 0.5)
    for changed in ((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (2**32, 0, 0, 0)):
        agree = (first == keep_mask(INDEX, stream_key(*changed), 0.5)).double().mean().item()
        assert abs(agree - 0.5) < 0.01, changed


def test_neighbours_and_far_indices_are_independent() -> None:
    key = stream_key(0, 1, 2, 3)
    mask = keep_mask(INDEX, key, 0.5)
    for distance in (1, 2, 64, 4096):
        agree = (mask[distance:] == mask[:-distance]).double().mean().item()
        assert abs(agree - 0.5) < 0.01
    beyond_32_bits = keep_mask(INDEX + 2**32, key, 0.5)
    assert abs((mask == beyond_32_bits).double().mean().item() - 0.5) < 0.01


def test_the_numbers_stay_what_they_are() -> None:
    """Masks are part of a run's result: a change of the hash is a change for users."""
    bits = keep_mask(torch.arange(16), stream_key(1, 2, 3, 4), 0.5).int().tolist()
    assert bits == [0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]
