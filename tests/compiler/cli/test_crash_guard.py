"""A command that crashes: one line, an exit code, and signals that reach it."""

import os
import signal
import subprocess
import sys
import time

import pytest

from meshfold.cli import crash_guard

PROGRAM = f"""
import os, signal, sys, time
sys.path.insert(0, {os.path.dirname(crash_guard.__file__)!r})
from crash_guard import guarded

def work():
    {{}}
    return 7

sys.exit(guarded(work, lambda message: print(message, file=sys.stderr), debug={{}}))
"""


def start(work: str, debug: bool = False) -> subprocess.Popen[str]:
    program = PROGRAM.format(work, debug)
    pipe = subprocess.PIPE
    # A session of its own: signals of this test's terminal are another matter.
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=pipe,
        stderr=pipe,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT"])
def test_a_crash_is_one_line_and_exit_code_1(name: str) -> None:
    process = start(f"os.kill(os.getpid(), signal.{name})")
    stdout, stderr = process.communicate(timeout=20)
    assert (process.returncode, stdout) == (1, "")
    assert stderr.startswith(f"crashed ({name}) in compiled code, most likely an op of the model")
    assert stderr.count("\n") == 1


def test_debug_says_where_it_crashed() -> None:
    stderr = start("os.kill(os.getpid(), signal.SIGSEGV)", debug=True).communicate(timeout=20)[1]
    assert "Segmentation fault" in stderr and "in work" in stderr


def test_killed_is_said_as_memory_that_ran_out() -> None:
    process = start("os.kill(os.getpid(), signal.SIGKILL)")
    assert process.communicate(timeout=20)[1].startswith("killed, as where memory runs out")
    assert process.returncode == 1


def test_an_exit_code_and_what_is_printed_pass() -> None:
    process = start("print('said')")
    assert process.communicate(timeout=20) == ("said\n", "")
    assert process.returncode == 7


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_is_handed_on_and_ends_both_alike(name: str) -> None:
    process = start(
        "signal.signal(signal.SIGINT, signal.SIG_DFL); print('up', flush=True); time.sleep(60)"
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.Signals[name])
    process.communicate(timeout=20)
    assert process.returncode == -signal.Signals[name]


def test_the_child_ends_with_its_parent() -> None:
    process = start("print(os.getpid(), flush=True); time.sleep(60)")
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.kill()
    process.communicate(timeout=20)
    end_s = time.monotonic() + 20
    while _is_alive(child):
        assert time.monotonic() < end_s
        time.sleep(0.05)


def _is_alive(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
