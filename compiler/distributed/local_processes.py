"""Runs a function on several local processes joined by gloo: what verify and the demo are made of.

    run_local(4, train, plan, on_report=show)    -> [result of rank 0, 1, 2, 3]

Every process calls train(report, plan) with the default process group up. report(value) sends a
value to the caller while the function runs. Function, arguments, reports and results are pickled,
so the function belongs to a module that the processes can import.
"""

import logging
import multiprocessing
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshfold.errors import MeshfoldError

Report = Callable[[Any], None]
GRACE_S = 2.0
"""After one process is known to have failed, how long to wait for earlier failures of others."""
COLLECTIVE_TIMEOUT = timedelta(minutes=10)


class LocalProcessError(MeshfoldError):
    """A process failed. `detail` is its traceback."""

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


def run_local(
    world_size: int,
    function: Callable[..., Any],
    *arguments: Any,
    on_report: Callable[[int, Any], None] | None = None,
    num_threads: int = 1,
    quiet: bool = False,
    grace_s: float = GRACE_S,
) -> list[Any]:
    """Results by rank of `function(report, *arguments)`.

    on_report(rank, value) is called here for every report. num_threads: of torch, per process.
    quiet: without the warnings that every process would repeat.
    Raises LocalProcessError when a process raises or dies; the others are ended once nothing
    has come from them for grace_s.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="meshfold-") as folder:
        store = str(Path(folder) / "store")
        processes, connections = [], []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                job = _Job(rank, world_size, store, num_threads, quiet, function, arguments)
                process = context.Process(target=_serve, args=(job, theirs), daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                connections.append(ours)
            return _collect(connections, on_report, grace_s)
        finally:
            for connection in connections:
                connection.close()
            for process in processes:
                process.join(GRACE_S)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(
    connections: list[Connection], on_report: Callable[[int, Any], None] | None, grace_s: float
) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, tuple[float, str, str]] = {}
    pending = {connection: rank for rank, connection in enumerate(connections)}
    while pending:
        ready = wait(list(pending), grace_s if failures else None)
        if not ready:
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = pending[connection]
            try:
                kind, value = connection.recv()
            except EOFError:
                # Killed or crashed: nobody else's failure made it end without a word.
                kind, value = "failed", (0.0, "the process ended", "")
            if kind == "report":
                if on_report is not None:
                    on_report(rank, value)
                continue
            del pending[connection]
            (results if kind == "done" else failures)[rank] = value
    if failures:
        # The first to fail is the cause: the others lose their peer and fail for that.
        rank = min(failures, key=lambda r: (failures[r][0], r))
        _, message, detail = failures[rank]
        raise LocalProcessError(f"rank {rank}: {message}", detail)
    return [results[rank] for rank in range(len(connections))]


@dataclass(frozen=True)
class _Job:
    """What one process is started with."""

    rank: int
    world_size: int
    store: str
    num_threads: int
    quiet: bool
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def _serve(job: _Job, connection: Connection) -> None:
    if job.quiet:
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
    try:
        torch.set_num_threads(job.num_threads)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{job.store}",
            rank=job.rank,
            world_size=job.world_size,
            timeout=COLLECTIVE_TIMEOUT,
        )
        result = job.function(lambda x: connection.send(("report", x)), *job.arguments)
        pickle.dumps(result)
        connection.send(("done", result))
        dist.destroy_process_group()
    except KeyboardInterrupt:
        pass
    except Exception as error:
        now = time.monotonic()  # one clock for all processes of a machine
        line = " ".join(str(error).split()) or type(error).__name__
        text = line if isinstance(error, MeshfoldError) else f"{type(error).__name__}: {line}"
        connection.send(("failed", (now, text, traceback.format_exc())))
