"""Masks made of the same in the same way are equal, until something writes to what they are of."""

import operator

import torch
from torch import Tensor

from meshfold.capture.masked_rows.equal_masks import EqualMasks


def _made(masks: EqualMasks, function: object, *args: object) -> Tensor:
    result: Tensor = function(*args)  # type: ignore[operator]
    masks.see(function, args, {}, result)
    return result


def test_equal_are_masks_of_one_tensor_and_one_number() -> None:
    masks, labels = EqualMasks(), torch.tensor([0, -1, 2])
    first, second = (_made(masks, Tensor.ge, labels, 0) for _ in range(2))
    other = _made(masks, Tensor.ge, labels, 1)
    assert masks.are_equal(first, second)
    assert not masks.are_equal(first, other)
    assert not masks.are_equal(first, _made(masks, Tensor.ge, labels, False))
    assert not masks.are_equal(first, _made(masks, Tensor.ge, labels.clone(), 0))
    both = [
        _made(masks, operator.and_, m, _made(masks, Tensor.ne, labels, 5)) for m in (first, second)
    ]
    assert masks.are_equal(*both)


def test_what_was_written_to_is_not_equal() -> None:
    masks, labels = EqualMasks(), torch.tensor([0, -1, 2])
    first = _made(masks, Tensor.ge, labels, 0)
    labels[0] = -1
    second = _made(masks, Tensor.ge, labels, 0)
    assert not masks.are_equal(first, second)
    second.logical_not_()
    assert not masks.are_equal(second, _made(masks, Tensor.ge, labels, 0))
    assert masks.are_equal(second, second)
