"""What one direction of a layer takes, with what ZeRO moves beside its kernels.

    max(f + c, (1 - s) g) + s g + (k - 1) min(f + c, (1 - s) g) f / (f + c)

f kernels, c collectives in the graph that they wait for, g what is gathered and reduced beside
both, s the share of it that nothing hides: of the first layer of a stage. While kernels and a
collective both run, both are slower by k (cost_models/simulation/streams.py); c leaves kernels
their share.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Busy:
    """One direction of one layer: kernels, and collectives in the graph that they wait for.
    slowdown: of kernels and what overlaps them."""

    kernels_s: float
    graph_s: float
    slowdown: float

    @property
    def seconds(self) -> float:
        return self.kernels_s + self.graph_s

    def beside_s(self, moved_s: float) -> float:
        """Seconds with so many of collectives beside it, of which kernels have their share."""
        return max(self.seconds, moved_s) + self.contention_s(moved_s)

    def contention_s(self, moved_s: float) -> float:
        """What it is slower beside these (cost_models/simulation/streams.py)."""
        both_s = min(self.seconds, moved_s)
        return (self.slowdown - 1) * both_s * self.kernels_s / self.seconds if both_s else 0.0


@dataclass(frozen=True)
class MicrobatchSeconds:
    """A microbatch of one layer: both directions; what ZeRO gathers and reduces beside them; both,
    overlapped but for a share, which nothing hides."""

    forward: Busy
    backward: Busy
    gather_s: float
    shard_reduce_s: float

    def forward_s(self, share: float = 0.0) -> float:
        return self.forward.beside_s((1 - share) * self.gather_s) + share * self.gather_s

    def backward_s(self, share: float = 0.0) -> float:
        moved_s = self.gather_s + self.shard_reduce_s
        return self.backward.beside_s((1 - share) * moved_s) + share * moved_s
