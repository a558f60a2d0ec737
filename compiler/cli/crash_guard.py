"""A crash of the process that runs a model becomes one line and exit code 1.

Models and torch are compiled code, too, and a segmentation fault in it ends a process without a
word. The command runs in a forked child, made before torch is imported (a millisecond); this
process waits, hands signals on, and says how the child ended where that was no exit.
"""

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
from collections.abc import Callable

import click

from meshfold.report.terminal import error_line

PR_SET_PDEATHSIG = 1
"""Of Linux's prctl."""
_HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


def guarded(work: Callable[[], int], say: Callable[[str], None], *, debug: bool = False) -> int:
    """The exit code of `work()`, or 1 once `say` was told in one line that it crashed.

    In the child this returns, too: what the caller does with the code happens in both processes.
    debug: the child says where it crashed. Where there is no fork, or no way to wait for signals,
    `work` runs unguarded.
    """
    if not hasattr(os, "fork") or not hasattr(signal, "sigwaitinfo"):
        return work()
    waited_for = {*_HANDED_ON, signal.SIGCHLD}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
    parent = os.getpid()
    child = os.fork()
    if not child:
        _bind_to(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if debug:
            faulthandler.enable()
        return work()
    status = _end_of(child, waited_for)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if not os.WIFSIGNALED(status):
        return os.waitstatus_to_exitcode(status)
    ended_by = signal.Signals(os.WTERMSIG(status))
    if ended_by in _CRASHES:
        say(
            f"crashed ({ended_by.name}) in compiled code, most likely an op of the model while it "
            "was captured or run; --debug shows where"
        )
    elif ended_by is signal.SIGKILL:
        say("killed, as where memory runs out; take a smaller model, batch or plan")
    else:  # end as the command did: a shell tells its user by the signal
        signal.signal(ended_by, signal.SIG_DFL)
        os.kill(parent, ended_by)
    return 1


def _end_of(child: int, waited_for: set[signal.Signals]) -> int:
    """The status with which the child ends. Signals for the two of them are handed on; those of a
    terminal have reached it already."""
    while True:
        found = signal.sigwaitinfo(waited_for)
        if found.si_signo != signal.SIGCHLD:
            if found.si_code <= 0:  # sent by a process, not by the kernel
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, found.si_signo)
            continue
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status


def _bind_to(parent: int) -> None:
    """Let this process end with its parent, however that dies."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def say_crash(message: str) -> None:
    """Prints on stderr which command ended so."""
    words = ["meshfold", *(word for word in sys.argv[1:] if not word.startswith("-"))]
    click.echo(error_line(f"{' '.join(words[:2])}: {message}"), err=True)
