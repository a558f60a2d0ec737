"""One pool of gloo processes per world size, shared by all multi-process tests of a session.

    pools.run(4, "support.programs.emit:train_steps", plan_text, seed=0)   -> results by rank

The function is named by import path (a module of tests/, or any installed one), runs on every rank
with the default process group up, and its result is pickled back. If a rank raises, the call raises
WorkerFailure with that rank's traceback, and the processes are replaced: they may wait for each
other for ever.

The processes are forked from one that has imported torch, transformers and meshfold and has done
nothing else: a start takes a tenth of a second of a core instead of five. Those of run_local, which
tests of verify and of scripts use, are new interpreters.
"""

import gc
import importlib
import itertools
import multiprocessing
import signal
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from meshfold.distributed.local_processes import (
    GRACE_S,
    LocalProcessError,
    Processes,
    failure,
    join_group,
)
from meshfold.torch_compat.process_groups import loopback_store

STARTUP_S = 120.0
MOST_POOLS = 2
LEAVE = "leave"
"""Sent when all ranks have answered: the process group is ended until the next call."""
IMPORTED = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "meshfold.api",
    "meshfold.cli.main",
)
"""By the process that pools are forked from."""


ABORTED = f"exit code {-signal.SIGABRT}"
"""How a process ends in which the C library found memory that was written where it must not be."""


class WorkerFailure(AssertionError):
    """A rank raised, died or took too long."""


class ForkedProcesses(Processes):
    """Those of run_local, but for how they start and end."""

    def __init__(self, world_size: int, serve: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(IMPORTED))
        self.connections = []
        self._forked = []
        for rank in range(world_size):
            ours, theirs = multiprocessing.Pipe()
            self.connections.append(ours)
            with theirs:
                process = context.Process(target=serve, args=(rank, theirs, *arguments))
                process.daemon = True
                process.start()
            self._forked.append(process)

    def _receive(self, connection: Connection, rank: int) -> tuple[str, Any]:
        try:
            return connection.recv()
        except (EOFError, ConnectionResetError):
            self._forked[rank].join(GRACE_S)
            return "failed", (0.0, "the process ended", f"exit code {self._forked[rank].exitcode}")

    def close(self, grace_s: float = GRACE_S) -> None:
        for connection in self.connections:
            connection.close()
        end_s = time.monotonic() + grace_s
        for process in self._forked:
            process.join(max(0.0, end_s - time.monotonic()))
            process.kill()
            process.join()
            process.close()


class Pool:
    """`world_size` processes joined by gloo."""

    def __init__(self, world_size: int) -> None:
        self._store = loopback_store()
        self._processes = ForkedProcesses(world_size, _serve, world_size, self._store.port)
        try:
            self._collect(STARTUP_S)
        except WorkerFailure:
            self.close()
            raise

    def run(self, function: str, *args: Any, timeout_s: float = 120.0, **kwargs: Any) -> list[Any]:
        """Results by rank of `function` ("module:name") called with the arguments on every rank."""
        self._send((function, args, kwargs))
        results = self._collect(timeout_s)
        self._send(LEAVE)
        return results

    def close(self) -> None:
        """End the processes."""
        self._processes.close()

    def _send(self, message: object) -> None:
        for connection in self._processes.connections:
            connection.send(message)

    def _collect(self, timeout_s: float) -> list[Any]:
        try:
            return self._processes.collect(timeout_s=timeout_s)
        except LocalProcessError as error:
            raise WorkerFailure(f"{error}\n{error.detail}") from None


class Pools:
    """Pools by world size, started when first used; of MOST_POOLS sizes at most, since every
    process holds memory."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}

    def run(self, world_size: int, function: str, *args: Any, **kwargs: Any) -> list[Any]:
        """See Pool.run; in new processes once more where one was aborted, with a warning. (One of
        some ten thousand calls was, in a process that had ended many groups; valgrind and
        MALLOC_CHECK_ found nothing in the programs.) Raises WorkerFailure."""
        try:
            return self._run(world_size, function, *args, **kwargs)
        except WorkerFailure as failure:
            if ABORTED not in str(failure):
                raise
            warnings.warn(f"aborted once, runs again: {function}", stacklevel=2)
        return self._run(world_size, function, *args, **kwargs)

    def _run(self, world_size: int, function: str, *args: Any, **kwargs: Any) -> list[Any]:
        pool = self._pools.pop(world_size, None)
        while pool is None and len(self._pools) >= MOST_POOLS:
            self._pools.pop(next(iter(self._pools))).close()
        self._pools[world_size] = pool or Pool(world_size)
        try:
            return self._pools[world_size].run(function, *args, **kwargs)
        except WorkerFailure:
            self._pools.pop(world_size).close()
            raise

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


def _serve(rank: int, connection: Connection, world_size: int, port: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What was imported stays: the collections below need not look at it.
    gc.freeze()
    for number in itertools.count():
        try:
            if (message := connection.recv() if number else None) == LEAVE:
                # Groups have threads that poll, also while nobody runs, as long as something holds
                # them: models are full of cycles.
                dist.destroy_process_group()
                gc.collect()
                continue
        except EOFError:
            break
        if dist.is_initialized():
            dist.destroy_process_group()
        join_group(rank, world_size, port, f"{number}", timedelta(seconds=60))
        try:
            connection.send(("done", _call(*message) if message else None))
        except BaseException as error:
            connection.send(failure(error))
    if dist.is_initialized():
        dist.destroy_process_group()


def _call(function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    module, _, name = function.partition(":")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return getattr(importlib.import_module(module), name)(*args, **kwargs)
