"""Gap and CPU time of the stage search, and what cutting a chain evenly loses.

    .venv/bin/python benchmarks/stages.py [--layers 96,126] [--stages 8,16,32] [--hop 0.005]
                                          [--interleaved]

Chains of an embedding, equal layers and a heavy head, 22 random strategies each (faster ones take
more memory), a budget halfway between the least and the most that is of use. hop: seconds of one
transfer as a share of a mean stage's time. Columns: layers, stages, microbatches; the schedule
found; gap to the proven bound before and after closing; CPU milliseconds; stages solved exactly;
and how much slower the same number of layers on every stage is, best warm-up and strategies.
--interleaved offers 2 to 4 stages per device as well: faster plans with a looser bound.
"""

import time

import click
import numpy as np

from meshfold.cost_models.pipeline.schedules import Schedule
from meshfold.errors import InfeasibleError
from meshfold.passes.stages.problem import LayerCosts, LayerRun, StageProblem
from meshfold.passes.stages.search import cut_step_s, default_schedules, search_stages

NUM_STRATEGIES = 22
STATE_BYTES, ACTIVATION_BYTES = 2_000_000_000, 800_000_000


def _layer(name: str, scale: float, share: float, draws: np.random.Generator) -> LayerCosts:
    """Strategies from fast to slow; `share` scales activations so that budgets stay alike."""
    slowness = np.sort(draws.uniform(1, 2, NUM_STRATEGIES))
    weight = (3 - slowness) * draws.uniform(0.8, 1.2, NUM_STRATEGIES)
    return LayerCosts.build(
        name,
        tuple(f"s{number:02d}" for number in range(NUM_STRATEGIES)),
        forward_s=slowness * scale / 3,
        backward_s=slowness * scale * 2 / 3 * draws.uniform(0.97, 1.03, NUM_STRATEGIES),
        state_bytes=np.floor(weight * STATE_BYTES),
        activation_bytes=np.floor(weight * ACTIVATION_BYTES * share),
    )


def problem(num_layers: int, p: int, m: int, hop: float, seed: int) -> StageProblem:
    draws = np.random.default_rng(seed)
    runs = (
        LayerRun(_layer("embedding", 0.4, 1 / p, draws), 1),
        LayerRun(_layer("layer", 1.0, 1 / p, draws), num_layers - 2),
        LayerRun(_layer("head", 1.5, 1 / p, draws), 1),
    )
    layer = runs[1].layer
    first_bytes = (layer.state_bytes + p * layer.activation_bytes) * num_layers / p * 1.2
    return StageProblem.build(
        runs,
        num_stages=p,
        num_microbatches=m,
        memory_bytes=int((first_bytes.min() + first_bytes.max()) / 2),
        hop_s=hop * 1.4 * num_layers / p,
    )


def _even_step_s(case: StageProblem) -> float:
    p = case.num_devices
    cuts = [round(i * case.num_layers / p) for i in range(p + 1)]
    return min(cut_step_s(case, schedule, cuts) for schedule in _single(case))


def _single(case: StageProblem) -> list[Schedule]:
    return [s for s in default_schedules(case) if s.num_chunks == 1]


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


@click.command()
@click.option("--layers", default="96,126")
@click.option("--stages", default="8,16,32")
@click.option("--microbatches", default="1,2,8", help="per stage")
@click.option("--hop", default=0.005)
@click.option("--seed", default=0)
@click.option("--interleaved", is_flag=True)
def main(
    layers: str, stages: str, microbatches: str, hop: float, seed: int, interleaved: bool
) -> None:
    """Prints one line per case."""
    click.echo("   L   p    m  schedule                        before    gap   CPU ms  cells  even")
    for num_layers in _numbers(layers):
        for p in _numbers(stages):
            for m in (p * each for each in _numbers(microbatches)):
                case = problem(num_layers, p, m, hop, seed)
                start = time.process_time()
                try:
                    plan = search_stages(case, None if interleaved else _single(case))
                except InfeasibleError as error:
                    click.echo(f"{num_layers:4d} {p:3d} {m:4d}  {error}")
                    continue
                cpu_ms = 1e3 * (time.process_time() - start)
                even = _even_step_s(case) / plan.step_s - 1
                click.echo(
                    f"{num_layers:4d} {p:3d} {m:4d}  {plan.schedule!s:30s} {plan.gap_before:7.2%} "
                    f"{plan.gap:6.3%} {cpu_ms:8.0f} {plan.stats.num_cells:6d} {even:5.1%}"
                )


if __name__ == "__main__":
    main()
