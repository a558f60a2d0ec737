"""What the comparisons between ranks cost a step: meshfold.training.calls.agreement.

    python benchmarks/ranks/agreement.py [--steps 5] [--sequence 128]

GPT-2 small on two gloo processes, data parallel. Steps of this machine differ by some percent, far
more than the comparisons take, so these are timed alone, on the same model and batch, between the
steps; what is given is the ratio of the medians, of calls (every step) and of contents (the first
steps).
"""

import statistics
import time
from collections.abc import Callable

import click
import torch
import torch.distributed as dist
import transformers

import meshfold
from meshfold.distributed.local_processes import Report, run_local

REPEATS = 20
"""Comparisons per step that is timed."""


def run_rank(_: Report, steps: int, sequence: int) -> tuple[float, float, float]:
    """Median seconds of a step, of a comparison of the call, and of one of the contents."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    tokens = torch.randint(0, 50257, (2, sequence), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, "labels": tokens}
    options = meshfold.CompileOptions(pins={"dp": 2, "zero": 0})
    compiled = meshfold.compile(
        model, "local-cpux2", batch, options=options, num_compared_batches=None
    )
    agreement = compiled._agreement
    assert agreement is not None
    compiled.train_step(batch)
    steps_s, calls_s, contents_s = [], [], []
    for number in range(steps):
        compiled._agreement = None
        steps_s.append(seconds(lambda: compiled.train_step(batch)))
        compiled._agreement = agreement
        compiled.zero_grad()
        for _ in range(REPEATS):
            calls_s.append(
                seconds(lambda k=number: agreement.check_call("train_step", batch, k, True))
            )
            contents_s.append(seconds(lambda: agreement.check_contents(batch, ())))
    return statistics.median(steps_s), statistics.median(calls_s), statistics.median(contents_s)


def seconds(call: Callable[[], object]) -> float:
    """Of one call, that all ranks begin together."""
    dist.barrier()
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


@click.command()
@click.option("--steps", default=5, show_default=True)
@click.option("--sequence", default=128, show_default=True)
def main(steps: int, sequence: int) -> None:
    """The ratios, by rank 0's clock."""
    step_s, call_s, contents_s = run_local(2, run_rank, steps, sequence, quiet=True)[0]
    print(f"GPT-2 small on 2 processes: a step of {step_s:.2f} s without comparisons")
    print(f"  calls       {call_s * 1e3:.2f} ms, {100 * call_s / step_s:.3f} % of it")
    print(f"  contents    {contents_s * 1e3:.2f} ms, {100 * contents_s / step_s:.3f} % of it")


if __name__ == "__main__":
    main()
