"""Work in forked children of this process: a crash, a hang or an exit ends one child and no more.

A child starts with all that its parent has imported and built, so that ranks cost no second
import and no second capture.
"""

import contextlib
import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

from meshfold.distributed.child_process import end_with_parent
from meshfold.torch_compat.process_groups import join_on_loopback, loopback_store

_FORK = multiprocessing.get_context("fork")


class ChildError(Exception):
    """A child raised, died or took too long."""


def in_child(work: Callable[[Callable[[Any], None]], Any], timeout_s: float) -> tuple[Any, ...]:
    """What `work(report)` reports, in order, and last what it returns. Raises ChildError with what
    was reported until then as its second argument."""
    ours, theirs = _FORK.Pipe()
    child = _FORK.Process(target=_run, args=(work, theirs))
    child.start()
    theirs.close()
    found: list[Any] = []
    end_s = time.monotonic() + timeout_s
    try:
        while wait([ours], max(0.0, end_s - time.monotonic())):
            try:
                kind, value = ours.recv()
            except EOFError:
                child.join()
                raise ChildError(f"crash: {_how(child.exitcode)}", found) from None
            if kind == "failed":
                raise ChildError(value, found)
            found.append(value)
            if kind == "done":
                return tuple(found)
        raise ChildError(f"takes more than {timeout_s:.0f} s", found)
    finally:
        child.kill()
        child.join()


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"


def on_ranks(world_size: int, work: Callable[[int], Any], timeout_s: float) -> list[Any]:
    """`work(rank)` on processes that are joined by gloo; results by rank. Raises ChildError."""
    store = loopback_store()

    def run(rank: int) -> Any:
        join_on_loopback(rank, world_size, store.port, "", timedelta(seconds=timeout_s))
        result = work(rank)
        dist.barrier()
        dist.destroy_process_group()
        return result

    pipes, children = [], []
    for rank in range(world_size):
        ours, theirs = _FORK.Pipe()
        children.append(_FORK.Process(target=_run, args=(lambda _, rank=rank: run(rank), theirs)))
        children[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        return _collected(pipes, timeout_s)
    finally:
        for child in children:
            child.kill()
            child.join()


def _collected(pipes: list[Connection], timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    pending = dict(enumerate(pipes))
    end_s = time.monotonic() + timeout_s
    while pending:
        ready = wait(list(pending.values()), max(0.0, end_s - time.monotonic()))
        if not ready:
            raise ChildError(f"ranks take more than {timeout_s:.0f} s")
        for rank, pipe in list(pending.items()):
            if pipe in ready:
                try:
                    kind, value = pipe.recv()
                except EOFError:
                    raise ChildError(f"rank {rank} crashed") from None
                if kind == "failed":
                    raise ChildError(value)
                results[rank] = value
                del pending[rank]
    return [results[rank] for rank in range(len(pipes))]


def _run(work: Callable[[Callable[[Any], None]], Any], pipe: Connection) -> None:
    end_with_parent()  # a child that is killed for its time leaves no ranks behind
    try:
        pipe.send(("done", work(lambda value: pipe.send(("report", value)))))
    except BaseException as error:
        with contextlib.suppress(OSError):
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{last.filename.rpartition('/')[2]}:{last.lineno}"
            text = " ".join(str(error).split())[:400]
            pipe.send(("failed", f"{type(error).__name__}: {text} ({where})"))
