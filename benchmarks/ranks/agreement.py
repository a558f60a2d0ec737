"""What the comparisons between ranks cost a step: meshfold.training.agreement.

    python benchmarks/ranks/agreement.py [--steps 6] [--sequence 128]

GPT-2 small on two gloo processes, data parallel. Steps with and without the comparisons take turns,
so that both see the same machine; what is given is the ratio of the medians, of the first steps
(calls and contents are compared) and of the later ones (calls alone).
"""

import statistics
import time
from collections.abc import Sequence

import click
import torch
import torch.distributed as dist
import transformers

import meshfold
from meshfold.distributed.local_processes import Report, run_local


def run_rank(_: Report, steps: int, sequence: int) -> list[tuple[float, float, float]]:
    """Per round the seconds of a step without comparisons, with those of calls, and with all."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    tokens = torch.randint(0, 50257, (2, sequence), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, "labels": tokens}
    options = meshfold.CompileOptions(pins={"dp": 2, "zero": 0})
    compiled = meshfold.compile(model, "local-cpux2", batch, options=options)
    agreement = compiled._agreement
    assert agreement is not None
    rounds = []
    for k in range(steps + 1):
        seconds = []
        for count in (None, 0, 1 << 30):
            compiled._agreement = None if count is None else agreement
            agreement.num_compared = count
            dist.barrier()
            start_s = time.perf_counter()
            compiled.train_step(batch)
            seconds.append(time.perf_counter() - start_s)
            compiled.zero_grad()
        if k:
            rounds.append((seconds[0], seconds[1], seconds[2]))
    return rounds


def median_s(rank_rounds: Sequence[tuple[float, float, float]], k: int) -> float:
    return statistics.median(seconds[k] for seconds in rank_rounds)


@click.command()
@click.option("--steps", default=6, show_default=True)
@click.option("--sequence", default=128, show_default=True)
def main(steps: int, sequence: int) -> None:
    """The ratios, by rank 0's clock."""
    rounds = run_local(2, run_rank, steps, sequence, quiet=True)[0]
    without_s = median_s(rounds, 0)
    print(f"GPT-2 small on 2 processes: a step of {without_s:.2f} s without comparisons")
    for k, what in ((1, "calls compared"), (2, "calls and contents compared")):
        print(f"  {what:28s} {median_s(rounds, k) / without_s:.4f} of it")


if __name__ == "__main__":
    main()
