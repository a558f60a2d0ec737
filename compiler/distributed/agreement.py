"""Work whose outcome all ranks share: done on all of them, or an error on all of them."""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from meshfold.distributed.waiting import lost_ranks
from meshfold.errors import MeshfoldError, OptionError, RanksDifferError
from meshfold.torch_compat.process_groups import default_timeout

T = TypeVar("T")

LEAST_WAIT_S = 0.01
"""Of one message: torch takes a timeout of 0 for none."""


def agreed(work: Callable[[], T]) -> T:
    """What `work` gives here, once it is done on all ranks. Raises MeshfoldError on all of them,
    naming the rank, where it raises on one; OptionError if that was one."""
    result, error = _tried(work)
    _check(_gathered(_told(error)), error)
    assert result is not None or error is None
    return result  # type: ignore[return-value]


def gathered(work: Callable[[], T]) -> list[T]:
    """What `work` gives on every rank, in their order. Raises as `agreed` does."""
    result, error = _tried(work)
    found = _gathered((result, _told(error)))
    _check([told for _, told in found], error)
    return [result for result, _ in found]  # type: ignore[misc]


def compared(work: Callable[[], T], facts: Callable[[T], Mapping[str, str]]) -> T:
    """What `work` gives here, if it is done on all ranks with the same facts: name -> value. Raises
    what `work` raises here; RanksDifferError on the other ranks, and on all for facts that differ.
    """
    result, error = _tried(work)
    own = {} if error is not None else facts(result)  # type: ignore[arg-type]
    everyone = _gathered((_told(error), dict(own)))
    if error is not None:
        raise error
    for rank, (told, other) in enumerate(everyone):
        if told is not None:
            raise RanksDifferError(f"rank {rank} failed: {told[0]}")
        for name, value in everyone[0][1].items():
            if other[name] != value:
                raise RanksDifferError(
                    f"rank {rank} has another {name} than rank 0 ({other[name][:12]}, not "
                    f"{value[:12]}); give every process the same plan, model, options and meshfold"
                )
    return result  # type: ignore[return-value]


def extremes(own: Tensor, group: dist.ProcessGroup, timeout_s: float) -> tuple[Tensor, Tensor]:
    """The least and the greatest of each integer over the ranks of a gloo group, on all of them.

    In every round a rank hears from one twice as far away as before, so the rounds are the
    logarithm of the number of ranks; gloo's own sums and gathers go around a ring, rank by rank.
    Raises RuntimeError of torch where they are not over after timeout_s: a message waits without
    end by itself.
    """
    ends_s = time.monotonic() + timeout_s
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    found = torch.stack([~own, own])  # ~ turns the order around and cannot overflow
    distance = 1
    while distance < num_ranks:
        other = torch.empty_like(found)
        works = (
            dist.isend(found, group=group, group_dst=(rank + distance) % num_ranks),
            dist.irecv(other, group=group, group_src=(rank - distance) % num_ranks),
        )
        for work in works:
            assert work is not None, "this rank is in the group"
            left_s = max(ends_s - time.monotonic(), LEAST_WAIT_S)
            work.wait(timedelta(seconds=left_s))
        found = torch.maximum(found, other)
        distance *= 2
    return ~found[0], found[1]


def waits_for_all(what: str) -> AbstractContextManager[None]:
    """A context that waits for all ranks of the job, outside of a step. Raises RankLostError."""
    timeout_s = default_timeout().total_seconds()
    return lost_ranks(dist.get_rank(), range(dist.get_world_size()), what, timeout_s)


def _tried(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # whatever it is, the other ranks wait to hear of it
        return None, error


def _told(error: Exception | None) -> tuple[str, bool] | None:
    """One line about an error, and whether it is an OptionError."""
    if error is None:
        return None
    line = " ".join(str(error).split())
    if not isinstance(error, MeshfoldError):
        line = f"{type(error).__name__}: {line}"
    return line, isinstance(error, OptionError)


def _gathered(mine: T) -> list[T]:
    if not dist.is_initialized():
        return [mine]
    found: list[T] = [mine] * dist.get_world_size()
    with waits_for_all("agreement of all ranks"):
        dist.all_gather_object(found, mine)
    return found


def _check(told: list[tuple[str, bool] | None], cause: Exception | None) -> None:
    for rank, found in enumerate(told):
        if found is not None:
            line, is_option = found
            where = f"rank {rank}: " if len(told) > 1 else ""
            raise (OptionError if is_option else MeshfoldError)(f"{where}{line}") from cause
