"""Where a rank is in its step, and the error when other ranks do not come to a collective there.

All waits of a step end here: a rank that died closes its connections, one that hangs lets the
timeout of the group pass (meshfold.distributed.rank_mesh), and both are a RuntimeError of torch.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from meshfold.errors import RankLostError


@dataclass
class Place:
    """Where this rank is: what its errors name. Written by whoever runs a step, read when it fails.

    in_flight: (collective, axes) by the address of the tensor in flight.
    """

    step: int = -1
    region: str = ""
    timeout_s: float = 0.0
    in_flight: dict[int, tuple[str, tuple[str, ...]]] = field(default_factory=dict)

    def begin(self, step: int) -> None:
        """A step begins."""
        self.step, self.region = step, ""

    def enter(self, region: str, _: object = None) -> None:
        """A hook of a gradient: the backward comes to a region."""
        self.region = region

    def __str__(self) -> str:
        """ "in step 3, region B"; empty before the first step."""
        step = f" in step {self.step}" if self.step >= 0 else ""
        return f"{step}, region {self.region}" if self.region else step


@contextlib.contextmanager
def lost_ranks(
    rank: int, ranks: Sequence[int], what: str, timeout_s: float, where: object = ""
) -> Iterator[None]:
    """A context that waits for other ranks. Raises RankLostError for a RuntimeError of torch.

    ranks: of the group, this one included. what: the collective; where: a Place.
    """
    try:
        yield
    except RuntimeError as error:
        raise lost(rank, ranks, what, timeout_s, error, where) from error


def lost(
    rank: int,
    ranks: Sequence[int],
    what: str,
    timeout_s: float,
    error: RuntimeError,
    where: object = "",
) -> RankLostError:
    """See lost_ranks."""
    others = [str(r) for r in ranks if r != rank]
    names = f"rank{'s' * (len(others) > 1)} {', '.join(others)}"
    return RankLostError(
        f"rank {rank} waited for {names}{where}, {what}: {cause(error, timeout_s)}; look for the "
        "first error of these ranks, or give a longer timeout_s"
    )


def cause(error: RuntimeError, timeout_s: float) -> str:
    """What a RuntimeError of torch means for who waited."""
    text = str(error)
    if "imed out" in text or "imeout" in text:
        return f"no answer in {timeout_s:g} s"
    if "closed" in text or "reset by peer" in text or "onnection refused" in text:
        return "the connection was closed"
    return " ".join(text.split("\n", 1)[0].split())
