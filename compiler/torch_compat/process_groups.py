"""Process groups of torch beyond its public calls: the timeout of a group, code that is to see no
group, and gloo that listens on this machine only.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from meshfold.errors import moved

HOST = "127.0.0.1"
LOOPBACK = "loopback"
"""Name of the backend that is gloo on HOST."""


_c10d: Any = dist
"""Stubs do not know all of it."""


def default_timeout() -> timedelta:
    """That of the caller's default group; torch's own default where a backend does not say."""
    group = dist.group.WORLD
    assert group is not None, "a process group is up"
    for device in group._device_types:
        options = getattr(group._get_backend(torch.device(device)), "options", None)
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return dist.constants.default_pg_timeout


@contextmanager
def as_one_process() -> Iterator[None]:
    """A context in which no process group is up: a model that gathers over ranks by itself
    (contrastive losses, counts of codes, synchronised statistics) is that of one process."""
    known: Any = getattr(distributed_c10d, "_world", None)
    if not hasattr(known, "default_pg"):  # pragma: no cover
        raise moved("default_pg")
    before = known.default_pg
    known.default_pg = None
    try:
        yield
    finally:
        known.default_pg = before


def loopback_store() -> Any:
    """A store on this machine, for the processes that `join_on_loopback` joins; `port` is its."""
    with socket.socket() as listening:
        listening.bind((HOST, 0))
        listening.listen()
        port, handle = listening.getsockname()[1], listening.detach()
    return _c10d.TCPStore(
        HOST, port, is_master=True, master_listen_fd=handle, wait_for_workers=False
    )


def store_at(port: int) -> Any:
    """The store that another process of this machine has made."""
    return _c10d.TCPStore(HOST, port, is_master=False)


def join_on_loopback(rank: int, world_size: int, port: int, name: str, timeout: timedelta) -> None:
    """Make this process a rank of the default group. It and all later groups of this process are
    gloo on 127.0.0.1, whatever network GLOO_SOCKET_IFNAME names. name: of the group, of several
    with one store after each other; port: of the store."""
    if LOOPBACK not in dist.Backend.backend_list:
        dist.Backend.register_backend(LOOPBACK, _gloo, devices=["cpu"])
    store = _c10d.PrefixStore(name, _c10d.TCPStore(HOST, port, is_master=False, timeout=timeout))
    dist.init_process_group(
        LOOPBACK, store=store, rank=rank, world_size=world_size, timeout=timeout
    )


def _gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    options = _c10d.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=HOST)]
    return _c10d.ProcessGroupGloo(store, rank, size, options)


def host_backend() -> str | None:
    """The backend of a group that compares numbers of the CPU: gloo where the default group is for
    accelerators alone, else None, its own."""
    return "gloo" if dist.get_backend() == "nccl" else None
