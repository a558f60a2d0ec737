"""Gap and CPU time of the stage search, and what cutting a chain evenly loses.

    python benchmarks/stages.py [--layers 96,126] [--stages 8,16,32] [--hop 0.005]
                                          [--interleaved]

Chains of an embedding, equal layers and a heavy head, 22 random strategies each (faster ones take
more memory), a budget halfway between the least and the most that is of use. hop: seconds of one
transfer as a share of a mean stage's time. Columns: layers, stages, microbatches; the schedule
found; gap to the proven bound before and after closing; CPU milliseconds; and how much slower the
same number of layers on every stage is, best warm-up and strategies. --interleaved offers 2 to 4
stages per device as well: faster plans with a looser bound.
"""

import math
import time

import click
import numpy as np

from meshfold.cost_models.pipeline.schedules import Schedule
from meshfold.passes.stages.answer import PipelinePlan
from meshfold.passes.stages.boundaries import BoundarySearch
from meshfold.passes.stages.problem import LayerCosts, LayerRun, StageProblem
from meshfold.passes.stages.schedules import offered_schedules
from meshfold.passes.stages.search import MAX_SOLVED, search_faster_stages
from meshfold.passes.stages.solved import StageSolver
from meshfold.passes.stages.tables import StageTables

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
    boundaries = [round(i * case.num_layers / p) for i in range(p + 1)]
    return min(
        _boundaries_step_s(case, schedule, tuple(boundaries))
        for schedule in _schedules(case, False)
    )


def _boundaries_step_s(
    case: StageProblem, schedule: Schedule, boundaries: tuple[int, ...]
) -> float:
    """Step time of a given division (first layer of each stage, and the number of layers) with the
    best strategies of every stage on its own; infinite where a stage does not fit."""
    search = BoundarySearch(case, schedule, StageTables(case, StageSolver(case)), MAX_SOLVED)
    search.try_boundaries(boundaries)
    return search.step_s


def _schedules(case: StageProblem, interleaved: bool) -> list[Schedule]:
    offered = offered_schedules(case.num_devices, case.num_microbatches, case.num_layers)
    whole = [s for s in offered if not s.splits_backward]
    return [s for s in whole if interleaved or s.num_virtual_stages == 1]


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
    click.echo("   L   p    m  schedule                        before    gap   CPU ms  even")
    for num_layers in _numbers(layers):
        for p in _numbers(stages):
            for m in (p * each for each in _numbers(microbatches)):
                case = problem(num_layers, p, m, hop, seed)
                start = time.process_time()
                plan = search_faster_stages(case, _schedules(case, interleaved), math.inf)
                if not isinstance(plan, PipelinePlan):
                    click.echo(f"{num_layers:4d} {p:3d} {m:4d}  nothing fits")
                    continue
                cpu_ms = 1e3 * (time.process_time() - start)
                even = _even_step_s(case) / plan.step_s - 1
                click.echo(
                    f"{num_layers:4d} {p:3d} {m:4d}  {plan.schedule!s:30s} {plan.gap_before:7.2%} "
                    f"{plan.gap:6.3%} {cpu_ms:8.0f} {even:5.1%}"
                )


if __name__ == "__main__":
    main()
