"""What a local process runs first: it ends with its parent, however that dies.

Started by meshfold.distributed.local_processes by its path, with the standard library alone: the
parent may die while torch is being imported. Linux kills the process with its parent; elsewhere, a
thread watches stdin, a pipe that ends with the parent. Ctrl-C is the parent's to answer.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
from multiprocessing import spawn
from multiprocessing.connection import Connection

PR_SET_PDEATHSIG = 1
"""Of Linux's prctl."""


def bind_to_parent(parent: int) -> None:
    """Let this process end with the process `parent`, which holds the other end of its stdin."""
    threading.Thread(target=_watch, daemon=True).start()
    end_with_parent()
    if os.getppid() != parent:
        os._exit(1)


def end_with_parent() -> None:
    """On Linux, let this process be killed when its parent dies."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))


def _watch() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 1):
            pass
    os._exit(1)


def main() -> None:
    """Arguments: process id of the parent, file descriptor of a connection, rank. What comes over
    the connection: what the parent's main module and paths are, then a call."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent, handle, rank = map(int, sys.argv[1:])
    bind_to_parent(parent)
    connection = Connection(handle)
    try:
        spawn.prepare(connection.recv())
        serve, arguments = connection.recv()
    except EOFError:
        return
    serve(rank, connection, *arguments)


if __name__ == "__main__":
    main()
