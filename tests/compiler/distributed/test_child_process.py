"""Local processes end with their parent, however it dies, and leave nothing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).resolve().parents[3]
PARENT = """
import signal
import sys
from support.processes.groups import say_process_id
from meshfold.distributed.local_processes import run_local
if __name__ == "__main__":
    # A shell that starts the tests in the background lets them ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    show = lambda rank, process: print(process, flush=True)
    try:
        run_local(2, say_process_id, on_report=show, quiet=True)
    except KeyboardInterrupt:
        sys.exit("interrupted")
"""
PATIENCE_S = 90.0


def _is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_children_end_with_their_parent(name: str, tmp_path: Path) -> None:
    script, folder = tmp_path / "parent.py", tmp_path / "temporary"
    script.write_text(PARENT)
    folder.mkdir()
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests"), "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert parent.stdout is not None
    children = [int(parent.stdout.readline()) for _ in range(2)]
    assert all(map(_is_alive, children))
    if name == "SIGINT":  # a terminal sends it to all
        os.killpg(parent.pid, signal.SIGINT)
    else:
        parent.send_signal(getattr(signal, name))
    _, said = parent.communicate(timeout=PATIENCE_S)
    end_s = time.monotonic() + PATIENCE_S
    while any(map(_is_alive, children)) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert not any(map(_is_alive, children))
    assert not list(folder.iterdir())
    assert said == ("interrupted\n" if name == "SIGINT" else "")
