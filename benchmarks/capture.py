"""Time and memory to capture and fold the largest example models, whose weights exist nowhere.

    python benchmarks/capture.py [--full] [CONFIG ...]

Llama-3-405B is to take at most 6 s, building the model included, and 2 GB beyond imports. Each
model runs in a process of its own; memory is how far the peak resident size grows after the
imports. --full traces every layer, for comparison. CPU seconds are what counts on a busy machine.
"""

import argparse
import resource
import subprocess
import sys
import time
from pathlib import Path

from meshfold.capture.pipeline import capture
from meshfold.models.from_argument import build_model

CONFIGS = Path(__file__).parent.parent / "examples" / "configs"
DEFAULT = ("llama-3-405b", "gpt3-175b")
SEQUENCE = 2048
TARGET_S = 6.0
TARGET_BYTES = 2 * 10**9


class Clock:
    """Wall and CPU seconds since it was made."""

    def __init__(self) -> None:
        self.start = time.perf_counter(), time.process_time()

    def __str__(self) -> str:
        return f"{self.cpu_s:6.2f} s CPU {time.perf_counter() - self.start[0]:6.2f} s wall"

    @property
    def cpu_s(self) -> float:
        return time.process_time() - self.start[1]


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(name: str, full_capture: bool) -> None:
    # A first model brings in what transformers and torch import late.
    small = build_model(str(CONFIGS / "llama-tiny.json"), sequence=8)
    capture(small.model, small.example_inputs, full_capture=True)

    before = peak_bytes()
    total = Clock()
    clock = Clock()
    built = build_model(str(CONFIGS / f"{name}.json"), sequence=SEQUENCE)
    print(f"{name}\n  build    {clock}")
    clock = Clock()
    graph = capture(built.model, built.example_inputs, full_capture=full_capture).graph
    print(f"  capture  {clock}\n  total    {total}")
    grown = peak_bytes() - before
    runs = " ".join(f"{graph.regions[region].name}^{count}" for region, _, count in graph.runs)
    num_distinct = sum(len(region.graph.ops) for region in graph.regions)
    num_weights = sum(parameter.numel() for parameter in built.model.parameters())
    print(f"  memory   {grown / 1e6:.0f} MB for {num_weights / 1e9:.0f} billion parameters")
    print(f"  fold     {runs}: {graph.num_ops} ops, {num_distinct} distinct")
    for note in graph.notes:
        print(f"  note     {note}")
    within = total.cpu_s <= TARGET_S and grown <= TARGET_BYTES
    print(f"  {'within' if within else 'OVER'} the target of {TARGET_S} s and 2 GB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("configs", nargs="*", default=DEFAULT)
    parser.add_argument("--full", action="store_true")
    arguments = parser.parse_args()
    if len(arguments.configs) == 1:
        measure(arguments.configs[0], arguments.full)
        return
    for name in arguments.configs:
        flags = ["--full"] if arguments.full else []
        subprocess.run([sys.executable, __file__, name, *flags], check=True)


if __name__ == "__main__":
    main()
