"""What it costs an optimizer that parameters know they are shards: CPU seconds of a step of AdamW
on parameters of one number, plain and as LocalShards.

    python benchmarks/ranks/local_shards.py
"""

import time

import click
import torch
from torch import nn

from meshfold.training.shards.local_shard import local_parameter, shard

NUM_PARAMETERS = 291
"""Of Llama-3-8B."""


def step_s(*, is_shard: bool, foreach: bool, repeats: int, num_parameters: int) -> float:
    """CPU seconds of one step, the least of several."""
    parameters = [
        local_parameter(torch.ones(1), requires_grad=True)
        if is_shard
        else nn.Parameter(torch.ones(1))
        for _ in range(num_parameters)
    ]
    for parameter in parameters:
        gradient = torch.ones(1)
        parameter.grad = shard(gradient) if is_shard else gradient
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, foreach=foreach)
    optimizer.step()
    found = []
    for _ in range(repeats):
        start_s = time.process_time()
        optimizer.step()
        found.append(time.process_time() - start_s)
    return min(found)


@click.command()
@click.option("--repeats", default=20, show_default=True)
@click.option("--parameters", "num_parameters", default=NUM_PARAMETERS, show_default=True)
def main(repeats: int, num_parameters: int) -> None:
    torch.set_num_threads(1)
    for foreach in (True, False):
        plain_s, shards_s = (
            step_s(
                is_shard=is_shard, foreach=foreach, repeats=repeats, num_parameters=num_parameters
            )
            for is_shard in (False, True)
        )
        kind = "one kernel for all" if foreach else "one by one"
        more_us = 1e6 * (shards_s - plain_s) / num_parameters
        click.echo(
            f"{num_parameters} parameters, {kind:18}  plain {1e3 * plain_s:6.2f} ms, shards "
            f"{1e3 * shards_s:6.2f} ms: {more_us:.0f} us more each"
        )


if __name__ == "__main__":
    main()
