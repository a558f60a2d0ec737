"""Time and memory of whole commands: planning very large models, showing a plan.

    python benchmarks/measuring/command_line.py [gpt3-175b] [llama-3-405b] [llama-3-8b]

Seconds are wall clock and CPU (user + system) of the command, imports included; resident memory is
its peak; `show` is the best of five.
"""

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONFIGS = Path(__file__).resolve().parents[2] / "examples" / "configs"
CASES = {
    "gpt3-175b": ("dgx-h100x128", "512"),
    "llama-3-405b": ("dgx-h100x2048", "2048"),
    "llama-3-8b": ("dgx-h100", "8"),
}
SHOWN = 5


def timed(*arguments: str) -> tuple[float, float]:
    """(wall, CPU) seconds of one command."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-c", "from meshfold.cli.main import main; main()", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    wall_s, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    print(f"{'command':<52}{'wall s':>8}{'CPU s':>8}")
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or CASES:
            cluster, batch = CASES[name]
            plan = str(Path(folder) / f"{name}.json")
            config = str(CONFIGS / f"{name}.json")
            options = ("--cluster", cluster, "--batch", batch, "-o", plan)
            wall_s, cpu_s = timed("plan", config, *options)
            print(f"{f'plan {name} on {cluster}, batch {batch}':<52}{wall_s:8.1f}{cpu_s:8.1f}")
            wall_s, cpu_s = min(timed("show", plan) for _ in range(SHOWN))
            size_kb = Path(plan).stat().st_size / 1000
            print(f"{f'show it ({size_kb:.0f} kB)':<52}{wall_s:8.2f}{cpu_s:8.2f}")
    # ru_maxrss is in kB on Linux and covers the largest child.
    peak_mb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1000
    print(f"largest resident memory: {peak_mb:.0f} MB")


if __name__ == "__main__":
    main()
