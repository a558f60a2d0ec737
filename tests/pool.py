"""One pool of gloo processes per world size, shared by all multi-process tests of a session.

    pools.run(4, "support_emit:train_steps", plan_text, seed=0)   -> [result of rank 0, 1, 2, 3]

The function is named by import path (a module of tests/, or any installed one), runs on every rank
with the default process group up, and its result is pickled back. If a rank raises, the call raises
WorkerFailure with that rank's traceback, and the processes are replaced: they may wait for each
other for ever.
"""

import gc
import importlib
import itertools
import multiprocessing
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

STARTUP_S = 120.0
LEAVE = "leave"
"""Sent when all ranks have answered: the process group is ended until the next call."""
GRACE_S = 2.0
"""How long the other ranks may take to fail, too, so that the first cause can be shown."""


class WorkerFailure(AssertionError):
    """A rank raised, died or took too long."""


class Pool:
    """`world_size` processes joined by gloo over a file store; no ports to collide."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._folder = tempfile.TemporaryDirectory(prefix="meshfold-pool-")
        store = str(Path(self._folder.name) / "store")
        context = multiprocessing.get_context("spawn")
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            arguments = (rank, world_size, store, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        try:
            self._collect(STARTUP_S)
        except WorkerFailure:
            self.close()
            raise

    def run(self, function: str, *args: Any, timeout_s: float = 120.0, **kwargs: Any) -> list[Any]:
        """Results by rank of `function` ("module:name") called with the arguments on every rank."""
        for connection in self._connections:
            connection.send((function, args, kwargs))
        results = self._collect(timeout_s)
        for connection in self._connections:
            connection.send(LEAVE)
        return results

    def close(self) -> None:
        """End the processes."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(GRACE_S)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    def _collect(self, timeout_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        pending = {c: rank for rank, c in enumerate(self._connections)}
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                try:
                    is_good, value = connection.recv()
                except EOFError:
                    is_good, value = False, f"process ended (exit code {self._exit_code(rank)})"
                (results if is_good else errors)[rank] = value
                if not is_good:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if len(results) < self.world_size:
            text = "\n".join(f"rank {r}: {errors[r]}" for r in sorted(errors))
            late = ", ".join(map(str, sorted(pending.values())))
            raise WorkerFailure(text + (f"\nno answer from rank {late}" if late else ""))
        return [results[r] for r in range(self.world_size)]

    def _exit_code(self, rank: int) -> int | None:
        self._processes[rank].join(GRACE_S)
        return self._processes[rank].exitcode


class Pools:
    """Pools by world size, started when first used."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}

    def run(self, world_size: int, function: str, *args: Any, **kwargs: Any) -> list[Any]:
        """See Pool.run. Raises WorkerFailure."""
        if world_size not in self._pools:
            self._pools[world_size] = Pool(world_size)
        try:
            return self._pools[world_size].run(function, *args, **kwargs)
        except WorkerFailure:
            self._pools.pop(world_size).close()
            raise

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


def _serve(rank: int, world_size: int, store: str, connection: Connection) -> None:
    torch.set_num_threads(1)

    def join(number: int) -> None:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(f"{store}-{number}", world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )

    join(0)
    connection.send((True, None))
    for number in itertools.count(1):
        try:
            if (message := connection.recv()) == LEAVE:
                # Groups have threads that poll, also while nobody runs, as long as something holds
                # them: models are full of cycles.
                dist.destroy_process_group()
                gc.collect()
                continue
        except EOFError:
            break
        if dist.is_initialized():
            dist.destroy_process_group()
        join(number)
        function, args, kwargs = message
        try:
            module, _, name = function.partition(":")
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                result = getattr(importlib.import_module(module), name)(*args, **kwargs)
            connection.send((True, result))
        except BaseException:
            connection.send((False, traceback.format_exc()))
    if dist.is_initialized():
        dist.destroy_process_group()
