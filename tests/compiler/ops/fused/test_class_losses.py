"""Losses by hand: a maximum and sums of rows, without any logits."""

import math

import pytest
import torch

from meshfold.ops.fused.class_losses import Targets, losses_of_sums


def test_losses_of_rows_by_hand() -> None:
    """Logits (0, log 3): z relative to the maximum is 4/3, so losses are log 4 and log 4/3; an
    ignored row has none."""
    target = torch.tensor([0, 1, -100])
    of = Targets.of(None, target, -100, 2, ())
    assert of.own.tolist() == [0, 1] and of.counts.tolist() == [True, True, False]
    largest = torch.full((3,), math.log(3), dtype=torch.float64)
    at_target = torch.tensor([0.0, math.log(3), 0.0], dtype=torch.float64)
    weighted = torch.full((3,), math.log(3), dtype=torch.float64)
    sums = torch.stack([torch.full_like(largest, 4 / 3), at_target, weighted])
    found = losses_of_sums(None, (), of, largest, sums, None, 0.0, 2)
    expected = [math.log(4), math.log(4 / 3), 0.0]
    assert found.losses.tolist() == pytest.approx(expected) and found.total == 2.0
    # Smoothed by 0.2: 0.8 of that, and 0.1 of the sum over both classes, 2 log 4 - log 3.
    smooth = losses_of_sums(None, (), of, largest, sums, None, 0.2, 2).losses
    spread = 0.1 * (2 * math.log(4) - math.log(3))
    assert smooth.tolist() == pytest.approx([*(0.8 * x + spread for x in expected[:2]), 0.0])
    # Classes weigh 2 and 5.
    weight = torch.tensor([2.0, 5.0], dtype=torch.float64)
    heavy = losses_of_sums(None, (), of, largest, sums, weight, 0.0, 2)
    assert heavy.losses.tolist() == pytest.approx([2 * expected[0], 5 * expected[1], 0.0])
    assert of.shares(weight, torch.float64).tolist() == [2.0, 5.0] and heavy.total == 7.0


def test_a_target_that_is_no_class_is_refused() -> None:
    with pytest.raises(IndexError, match="class"):
        Targets.of(None, torch.tensor([2]), -100, 2, ())
