"""Legal degrees against plain enumeration."""

import itertools
import math

import pytest

from meshfold.errors import OptionError
from meshfold.passes.mesh_degrees import (
    AtMost,
    Divides,
    Multiply,
    WhereSplit,
    divisors,
    legal_degrees,
    outermost_first,
)

AXES = {"tp": None, "pp": None, "dp": None, "ep": (1, 2, 3, 6), "b": None, "m": None, "v": (1, 2)}


def conditions(num_devices, heads=12, layers=7, batch=24):
    return (
        Multiply(("tp", "pp", "dp"), num_devices),
        Divides(("tp",), (heads,)),
        AtMost(("tp",), 4),
        Multiply(("dp", "b", "m"), batch),
        Divides(("ep",), ("dp", "tp")),
        AtMost(("pp", "v"), layers),
        WhereSplit("v", "pp", "m"),
    )


def enumerated(num_devices, heads=12, layers=7, batch=24):
    """The same choices by loops and plain tests."""
    degrees = range(1, num_devices + 1)
    for tp, pp, dp in itertools.product(degrees, repeat=3):
        if tp * pp * dp != num_devices or heads % tp or tp > 4 or batch % dp:
            continue
        for ep, b, v in itertools.product((1, 2, 3, 6), divisors(batch // dp), (1, 2)):
            m = batch // dp // b
            if dp * tp % ep or pp * v > layers or (v > 1 and (pp == 1 or m % pp)):
                continue
            yield tp, pp, dp, ep, b, m, v


@pytest.mark.parametrize("num_devices", [1, 2, 6, 7, 12, 24, 36])
def test_equal_to_enumeration(num_devices):
    degrees = legal_degrees(AXES, conditions(num_devices))
    assert list(map(tuple, degrees.values.tolist())) == sorted(enumerated(num_devices))


def test_degrees_are_not_only_powers_of_two():
    degrees = legal_degrees({"tp": None, "dp": None}, [Multiply(("tp", "dp"), 12)])
    assert set(degrees.column("tp").tolist()) == {1, 2, 3, 4, 6, 12}


def test_every_cut_is_counted():
    rules = [Multiply(("tp", "dp"), 12), Divides(("tp",), (8,)), AtMost(("tp",), 2)]
    degrees = legal_degrees({"tp": None, "dp": None}, rules)
    assert degrees.values.tolist() == [[1, 12], [2, 6]]
    # tp: six divisors of 12; 3, 6, 12 do not divide 8, and 4 is above 2; then two times six dp.
    assert degrees.cuts == {"tp * dp = 12": 10, "tp divides 8": 3, "tp <= 2": 1}


def test_rows_by_name():
    degrees = legal_degrees({"tp": None, "dp": None}, [Multiply(("tp", "dp"), 6)])
    assert degrees.row(1) == {"tp": 2, "dp": 3}
    assert outermost_first({"tp": 2, "dp": 3, "pp": 1}, ("pp", "dp", "tp")) == (
        ("dp", 3),
        ("tp", 2),
    )


def test_divisors():
    for number in (1, 2, 12, 97, 16384):
        assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]
    assert math.prod(divisors(12)) == 12**3


def test_axis_without_values():
    with pytest.raises(OptionError, match="cp has no values"):
        legal_degrees({"tp": None, "cp": None}, [Multiply(("tp",), 4)])
    with pytest.raises(OptionError, match="at least 1"):
        legal_degrees({"tp": (0, 1)}, [])
