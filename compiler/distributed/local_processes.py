"""Runs a function on several local processes joined by gloo: what verify and the demo are made of.

    run_local(4, train, plan, on_report=show)    -> [result of rank 0, 1, 2, 3]

Every process calls train(report, plan) with the default process group up. report(value) sends a
value to the caller while the function runs. Function, arguments, reports and results are pickled,
so the function belongs to a module that the processes can import.

The processes end with the caller, however it dies (meshfold.distributed.child_process), listen on
this machine only, and leave no file.
"""

import contextlib
import logging
import math
import multiprocessing
import os
import pickle
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import spawn
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from meshfold.distributed import child_process
from meshfold.errors import MeshfoldError
from meshfold.torch_compat.process_groups import join_on_loopback, loopback_store

Report = Callable[[Any], None]
GRACE_S = 2.0
"""After one process is known to have failed, how long to wait for earlier failures of others."""
COLLECTIVE_TIMEOUT = timedelta(minutes=10)


class LocalProcessError(MeshfoldError):
    """A process failed. `detail` is its traceback, or exit code."""

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


def run_local(
    world_size: int,
    function: Callable[..., Any],
    *arguments: Any,
    on_report: Callable[[int, Any], None] | None = None,
    quiet: bool = False,
    grace_s: float = GRACE_S,
) -> list[Any]:
    """Results by rank of `function(report, *arguments)`.

    on_report(rank, value) is called here for every report. quiet: without the warnings that every
    process would repeat. Raises LocalProcessError when a process raises or dies; the others are
    ended once nothing has come from them for grace_s.
    """
    store = loopback_store()
    job = world_size, store.port, quiet, function, arguments
    processes = Processes(world_size, _serve, *job)
    try:
        return processes.collect(on_report, grace_s=grace_s)
    except KeyboardInterrupt:
        processes.close(grace_s=0.0)
        raise
    finally:
        processes.close()


class Processes:
    """Spawned processes by rank, a pipe to each: they run `serve(rank, connection, *arguments)`
    and send ("report", value), ("done", result) or ("failed", what `failure` gives)."""

    def __init__(self, world_size: int, serve: Callable[..., None], *arguments: Any) -> None:
        self.connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        preparation = spawn.get_preparation_data("meshfold")
        preparation["authkey"] = bytes(preparation["authkey"])
        try:
            start = [sys.executable, child_process.__file__, str(os.getpid())]
            for rank in range(world_size):
                ours, theirs = multiprocessing.Pipe()
                self.connections.append(ours)
                handle = theirs.fileno()
                command = [*start, str(handle), str(rank)]
                with theirs:
                    process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[handle])
                self._processes.append(process)
            for message in (preparation, (serve, arguments)):
                for connection in self.connections:
                    with contextlib.suppress(OSError):  # it died; `collect` says so
                        connection.send(message)
        except BaseException:
            self.close(grace_s=0.0)
            raise

    def collect(
        self,
        on_report: Callable[[int, Any], None] | None = None,
        *,
        grace_s: float = GRACE_S,
        timeout_s: float = math.inf,
    ) -> list[Any]:
        """One result from every process, by rank. Raises LocalProcessError for the first failure,
        or for ranks that have not answered after timeout_s."""
        results: dict[int, Any] = {}
        failures: dict[int, tuple[float, str, str]] = {}
        pending = {connection: rank for rank, connection in enumerate(self.connections)}
        end_s = time.monotonic() + timeout_s
        while pending:
            left_s = min(grace_s if failures else math.inf, end_s - time.monotonic())
            ready = wait(list(pending), None if left_s == math.inf else max(0.0, left_s))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = pending[connection]
                kind, value = self._receive(connection, rank)
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
        if pending:
            silent = ", ".join(map(str, sorted(pending.values())))
            raise LocalProcessError(f"no answer from rank {silent} in {timeout_s:g} s")
        return [results[rank] for rank in range(len(self.connections))]

    def _receive(self, connection: Connection, rank: int) -> tuple[str, Any]:
        try:
            message: tuple[str, Any] = connection.recv()
        except EOFError:
            # Killed or crashed: nobody else's failure ends a process silently.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._processes[rank].wait(GRACE_S)
            code = self._processes[rank].returncode
            return "failed", (0.0, "the process ended", f"exit code {code}")
        return message

    def close(self, grace_s: float = GRACE_S) -> None:
        """End the processes, at the latest after grace_s."""
        for connection in self.connections:
            connection.close()
        end_s = time.monotonic() + grace_s
        for process in self._processes:
            try:
                process.wait(max(0.0, end_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdin is not None
            process.stdin.close()


def join_group(rank: int, world_size: int, port: int, name: str, timeout: timedelta) -> None:
    """Make this process a rank of the default group, over gloo on this machine. port: of the store
    of all ranks; name: of this group, of several after each other."""
    torch.set_num_threads(1)
    join_on_loopback(rank, world_size, port, name, timeout)


def failure(error: BaseException) -> tuple[str, tuple[float, str, str]]:
    """The message for `error`, the exception being handled: when, in one line, its traceback."""
    now = time.monotonic()  # one clock for all processes of a machine
    line = " ".join(str(error).split()) or type(error).__name__
    text = line if isinstance(error, MeshfoldError) else f"{type(error).__name__}: {line}"
    return "failed", (now, text, traceback.format_exc())


def _serve(
    rank: int,
    connection: Connection,
    world_size: int,
    port: int,
    quiet: bool,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    if quiet:
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
    try:
        join_group(rank, world_size, port, "", COLLECTIVE_TIMEOUT)
        result = function(lambda x: connection.send(("report", x)), *arguments)
        pickle.dumps(result)
        connection.send(("done", result))
        dist.destroy_process_group()
    except Exception as error:
        # A caller that has gone, which is why peers are gone, too, needs no word of it.
        with contextlib.suppress(OSError):
            connection.send(failure(error))
