"""All legal degrees of parallelism for a cluster of any size, as one integer table.

A choice is one whole number per named axis: degrees of data, tensor, pipeline, context and expert
parallelism, and numbers that go with them (microbatch size b, microbatches m, chunks v). Which
choices are legal is data:

    Multiply(("tp", "pp", "cp", "dp"), 1024)   the axes use all devices
    Multiply(("dp", "b", "m"), 1536)           every sample of the batch is in one microbatch
    Divides(("tp",), (96,))                    tensor parallelism cuts whole heads
    Divides(("ep",), ("dp", "cp"))             experts share the devices of other axes
    AtMost(("pp", "v"), 96)                    a stage has at least one layer
    WhereSplit("v", "pp", "m")                 interleaving takes whole groups of microbatches

Axes take all divisors of their products, not only powers of two, or the values given. The table is
built axis by axis; a condition is applied as soon as its axes are there, so that the table never
gets much larger than the result (legal_degrees). Every condition counts what it cut.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshfold.errors import OptionError

Column = NDArray[np.int64]


@dataclass(frozen=True)
class Multiply:
    """The axes' values multiply to `total`."""

    axes: tuple[str, ...]
    total: int

    def __str__(self) -> str:
        return f"{' * '.join(self.axes)} = {self.total}"

    def holds(self, columns: Mapping[str, Column]) -> NDArray[np.bool_]:
        """Which rows can still be completed, given some of the axes."""
        known = [columns[axis] for axis in self.axes if axis in columns]
        product = np.asarray(np.prod(known, axis=0, dtype=np.int64))
        if len(known) == len(self.axes):
            return np.asarray(product == self.total)
        return np.asarray(self.total % product == 0)


@dataclass(frozen=True)
class Divides:
    """The product of the axes divides the product of `of`: numbers, or names of other axes."""

    axes: tuple[str, ...]
    of: tuple[int | str, ...]

    def __str__(self) -> str:
        return f"{' * '.join(self.axes)} divides {' * '.join(map(str, self.of))}"

    def holds(self, columns: Mapping[str, Column]) -> NDArray[np.bool_]:
        """Which rows keep it, given all axes it names."""
        product = np.asarray(np.prod([columns[axis] for axis in self.axes], axis=0, dtype=np.int64))
        number = math.prod(value for value in self.of if isinstance(value, int))
        whole = np.full_like(product, number)
        for name in self.of:
            if isinstance(name, str):
                whole = whole * columns[name]
        return np.asarray(whole % product == 0)


@dataclass(frozen=True)
class AtMost:
    """The product of the axes is at most `limit`."""

    axes: tuple[str, ...]
    limit: int

    def __str__(self) -> str:
        return f"{' * '.join(self.axes)} <= {self.limit}"

    def holds(self, columns: Mapping[str, Column]) -> NDArray[np.bool_]:
        """Which rows keep it, given all axes it names."""
        product = np.asarray(np.prod([columns[axis] for axis in self.axes], axis=0, dtype=np.int64))
        return np.asarray(product <= self.limit)


@dataclass(frozen=True)
class WhereSplit:
    """Where `axis` is above 1, `divisor` is above 1 too and divides `dividend`: chunks need a
    pipeline and whole groups of its microbatches, ("v", "pp", "m")."""

    axis: str
    divisor: str
    dividend: str

    def __str__(self) -> str:
        return f"1 < {self.divisor} divides {self.dividend} where {self.axis} > 1"

    def holds(self, columns: Mapping[str, Column]) -> NDArray[np.bool_]:
        """Which rows keep it, given all axes it names."""
        divisor = columns[self.divisor]
        fits = (divisor > 1) & (columns[self.dividend] % divisor == 0)
        return np.asarray((columns[self.axis] == 1) | fits)


Condition = Multiply | Divides | AtMost | WhereSplit


@dataclass(frozen=True, eq=False)
class Degrees:
    """names: of the axes. values: int64, one row per legal choice, in lexicographic order.
    cuts: rows each condition removed while the table was built."""

    names: tuple[str, ...]
    values: Column
    cuts: Mapping[str, int]

    def column(self, name: str) -> Column:
        """All values of one axis."""
        return self.values[:, self.names.index(name)]

    def row(self, index: int) -> dict[str, int]:
        """One choice."""
        return dict(zip(self.names, self.values[index].tolist(), strict=True))


def divisors(number: int) -> list[int]:
    """All divisors, increasing."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})


def legal_degrees(
    axes: Mapping[str, Sequence[int] | None], conditions: Sequence[Condition]
) -> Degrees:
    """Every choice that keeps all conditions.

    axes: values to try by name, None for all divisors of the totals the axis is a factor of.
    Conditions are applied in the order given. Raises OptionError for an axis without values.
    """
    names = tuple(axes)
    table: dict[str, Column] = {}
    pending = list(conditions)
    cuts = {str(condition): 0 for condition in conditions}
    rows = 1
    for name in names:
        values = _values(name, axes[name], conditions)
        table = {known: np.repeat(column, len(values)) for known, column in table.items()}
        table[name] = np.tile(values, rows)
        rows *= len(values)
        for condition in list(pending):
            if not _applies(condition, name, table):
                continue
            kept = condition.holds(table)
            cuts[str(condition)] += rows - int(kept.sum())
            table = {known: column[kept] for known, column in table.items()}
            rows = len(table[name])
    values = np.stack([table[name] for name in names], axis=1)
    return Degrees(names, values[np.lexsort(values.T[::-1])], cuts)


def _values(name: str, given: Sequence[int] | None, conditions: Sequence[Condition]) -> Column:
    if given is None:
        totals = [c.total for c in conditions if isinstance(c, Multiply) and name in c.axes]
        if not totals:
            raise OptionError(f"axis {name} has no values and is a factor of nothing")
        given = divisors(math.gcd(*totals))
    if not given or min(given) < 1:
        raise OptionError(f"axis {name} needs values of at least 1, got {list(given)}")
    return np.unique(np.asarray(given, np.int64))


def _applies(condition: Condition, name: str, table: Mapping[str, Column]) -> bool:
    """Whether the newest axis is one of the condition's, and the others are there: products are
    checked at each of their axes, the rest once complete."""
    if isinstance(condition, Multiply):
        return name in condition.axes
    if isinstance(condition, WhereSplit):
        named = {condition.axis, condition.divisor, condition.dividend}
    else:
        others = condition.of if isinstance(condition, Divides) else ()
        named = {*condition.axes, *(value for value in others if isinstance(value, str))}
    return name in named and named <= table.keys()


def outermost_first(row: Mapping[str, int], order: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """(axis, degree) of the mesh, for devices numbered so that neighbours have the fastest links.

    order: axes from the one that may cross the slowest links (pp, dp) to the one that needs the
    fastest (tp). Axes of degree 1 are left out.
    """
    return tuple((name, row[name]) for name in order if row[name] > 1)
