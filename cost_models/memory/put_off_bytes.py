"""What a backward leaves for W, where the schedule has gradients of weights apart."""

from collections.abc import Mapping
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
    def parts(self) -> list[tuple[tuple[int, int, int], ...]]:
        """Products behind each of which gradients are handed over."""
        products = self.put_off.products
        return [(p,) for p in products] if self.goes_alone and products else [products]


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
