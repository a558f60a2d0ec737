"""A lower bound on the step of one division over all strategies of its stages.

Under any strategies the makespan is at least the length of any chain of dependent passes. Take the
critical path of a simulated plan, on which stage i has a_i forwards, b_i backwards (input gradients
where W is apart) and c_i weight gradients. Its length is a sum over stages, so each stage's share
can be minimised alone:

    bound = transfers on the path + sum_i min over strategies of (a_i F + b_i B + c_i W)

where the minimum is relaxed: with e = min(a, b, c) and t the exact least time of the stage,
max(LP(a F + b B + c W), e t + LP((a - e) F + (b - e) B + (c - e) W)). Most stages have a = b.
"""

from collections.abc import Sequence

import numpy as np

from meshfold.cost_models.pipeline.actions import Pass
from meshfold.cost_models.pipeline.makespan import critical_path
from meshfold.cost_models.pipeline.schedules import Schedule, counted_in_flight
from meshfold.passes.run.hull import FloatArray, lp_values
from meshfold.passes.stages.problem import StageProblem
from meshfold.passes.stages.solved import SolvedStage, stage_times


def critical_path_bound_s(
    problem: StageProblem,
    schedule: Schedule,
    boundaries: Sequence[int],
    solved_stages: Sequence[SolvedStage],
) -> float:
    """No strategies make the stages faster. solved_stages: the exact stages of the division."""
    times = stage_times(solved_stages, problem.hop_s[list(boundaries[1:-1])])
    sync_s = [solved.sync_s for solved in solved_stages]
    path = critical_path(schedule.actions(), times, sync_s)
    passes = np.zeros((len(solved_stages), 3))
    kinds = list(Pass)
    bound_s = 0.0
    for action in path:
        passes[action.stage, kinds.index(action.kind)] += 1
    for left, right in zip(path, path[1:], strict=False):
        if left.stage != right.stage:
            bound_s += float(times.hop_s[min(left.stage, right.stage)])
    if not schedule.splits_backward:
        passes[:, 2] = passes[:, 1]
    has_sync = any(run.layer.sync_s.any() for run in problem.runs)
    for i, solved in enumerate(solved_stages):
        rates = np.append(passes[i], float(i == path[-1].stage))
        share_s = _least_s(problem, schedule, boundaries, i, rates)
        least = float(passes[i].min())
        if not has_sync:
            rest = np.append(passes[i] - least, 0.0)
            rest_s = _least_s(problem, schedule, boundaries, i, rest)
            share_s = max(share_s, least * solved.lower_s + rest_s)
        bound_s += share_s
    return bound_s


def _least_s(
    problem: StageProblem,
    schedule: Schedule,
    boundaries: Sequence[int],
    device: int,
    rates: FloatArray,
) -> float:
    """Relaxed least of rates . (F, B without W, W, sync_s) over the strategies of a stage."""
    in_flight = problem.fullest(counted_in_flight(schedule)[device])
    types = []
    for run, count in problem.run_slices(boundaries[device], boundaries[device + 1]):
        costs = problem.runs[run].layer
        seconds = (costs.forward_s, costs.backward_s - costs.weight_s, costs.weight_s, costs.sync_s)
        memory = costs.bytes_with(in_flight)
        types.append((rates @ np.stack(seconds), memory, count))
    budget = int(problem.memory_bytes[device]) - in_flight[0] * int(
        problem.resident_bytes[boundaries[device]]
    )
    return float(lp_values(types, budget))
