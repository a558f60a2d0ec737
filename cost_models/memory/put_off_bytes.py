"""What a backward leaves for W, where the schedule has gradients of weights apart."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PutOffFactors:
    """Of a product its operands by number: weights, whose gradients are put off, and what these
    need."""

    weights: tuple[int, ...]
    others: tuple[int, ...]


@dataclass(frozen=True)
class PutOffBytes:
    """kept: what its products need, and gradients that wait for it. products: (gradient, what
    nobody needs behind it, scratch), in the order of W."""

    kept: int = 0
    products: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True)
class LeftToW:
    """What one instance leaves to W. direct: bytes of its gradients that go straight to .grad;
    goes_alone: whether all of them do, each behind its product. Others go when all are there."""

    put_off: PutOffBytes
    direct: int = 0
    goes_alone: bool = False

    @property
    def parts(self) -> list["PartOfW"]:
        """Between one time that gradients are handed over and the next."""
        products, left = self.put_off.products, self.put_off.kept
        found = []
        for part in [(p,) for p in products[:-1]] if self.goes_alone else ():
            found.append(_part(part, sum(freed for _, freed, _ in part)))
            left -= found[-1].freed
        return [*found, _part(products[-1:] if self.goes_alone else products, left)]


@dataclass(frozen=True)
class PartOfW:
    """Products whose gradients are handed over together, in bytes. most: beside what they need;
    made: their gradients; freed: of what was kept."""

    most: int
    made: int
    freed: int
    behind: int
    """What is there beside what is still kept when the gradients are handed over."""


def _part(products: Sequence[tuple[int, int, int]], freed_bytes: int) -> PartOfW:
    there = most = 0
    for gradient, freed, scratch in products:
        there += gradient
        most = max(most, there + scratch)
        there -= freed
    made = sum(gradient for gradient, _, _ in products)
    return PartOfW(most, made, freed_bytes, freed_bytes + there)


class HeldProducts:
    """The products of a region that are put off, as its backward comes to them."""

    def __init__(self) -> None:
        self._products: list[tuple[int, Mapping[int, int], int]] = []

    def add(self, gradient_bytes: int, needs: Mapping[int, int], scratch_bytes: int) -> set[int]:
        """needs: storage -> bytes. Returns the storages that no product before needs."""
        new = {s for s in needs if not any(s in before for _, before, _ in self._products)}
        self._products.append((gradient_bytes, needs, scratch_bytes))
        return new

    def with_waiting(self, waiting_bytes: int) -> PutOffBytes:
        """All of them, and gradients of so many bytes that wait for W, too."""
        last = {s: n for n, (_, needs, _) in enumerate(self._products) for s in needs}
        products = tuple(
            (made, sum(size for s, size in needs.items() if last[s] == n), scratch)
            for n, (made, needs, scratch) in enumerate(self._products)
        )
        return PutOffBytes(waiting_bytes + sum(freed for _, freed, _ in products), products)
