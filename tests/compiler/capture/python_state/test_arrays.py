"""What arrays hold."""

from operator import is_

import numpy as np
import pytest

from meshfold.capture.python_state.arrays import array_content, write_array


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3),
        np.arange(6.0).reshape(2, 3).T,
        np.array([{1: 2}, None, "a", 1.0], object).reshape(2, 2),
        np.array([(1, 2.0), (3, 4.0)], [("a", int), ("b", "f4")]),
        np.array(["one", "three"]),
    ],
)
def test_what_was_held_is_put_back(array: np.ndarray) -> None:
    before, content = array.copy(), array_content(array)
    array.flat[0] = array.flat[1]
    assert not np.array_equal(array, before)
    write_array(array, content)
    assert np.array_equal(array, before)


def test_objects_are_told_apart_by_identity() -> None:
    array = np.array([np.arange(2), [1], None], object)
    content = array_content(array)
    assert all(map(is_, content, array_content(array)))
    array[:] = None
    write_array(array, content)
    assert all(map(is_, content, array))


def test_large_arrays_are_left_alone() -> None:
    array = np.zeros(10**5)
    assert array_content(array) == ()
    array[0] = 1
    write_array(array, ())
    assert array[0] == 1
