"""What the stages of a pipeline run when, measured: a few steps on local processes.

Every process trains the model under the plan, in its own dtypes, as verify starts them. Clocks are
those of one machine. Of the measured steps the shortest counts: others were disturbed.
"""

from collections.abc import Sequence

import torch.distributed as dist

from meshfold.api import bind
from meshfold.codegen.emit.pipeline import EmittedPipeline
from meshfold.distributed.local_processes import Report, run_local
from meshfold.errors import MeshfoldError, OptionError
from meshfold.ir.plan import Plan
from meshfold.models.from_argument import build_for_plan
from meshfold.plan_file.io import plan_from_json, plan_to_json
from meshfold.report.pipeline_timeline import ActionSpan
from meshfold.runtime.pipeline_runner import PipelineRunner
from meshfold.validation.captured import captured_as_planned
from meshfold.validation.scaled_down import MAX_PROCESSES

NUM_STEPS = 4
"""The first one brings in what torch loads late and is not measured."""


def measured_spans(plan: Plan, model_argument: str) -> tuple[ActionSpan, ...]:
    """Every action of a step, by device and time, of one rank per device; from the first start.

    Raises OptionError for a plan without stages, MeshfoldError if it needs more processes than this
    machine should start, PlanMismatchError if the plan is for another model.
    """
    if not plan.schedule:
        raise OptionError(
            f"{plan.strategy.label}: the plan runs every batch in one pass, there are no stages to "
            "measure; plan with --pin pp=2 or --pin microbatches=4"
        )
    if plan.world_size > MAX_PROCESSES:
        raise MeshfoldError(
            f"the plan is for {plan.world_size} processes, timeline --measured starts at most "
            f"{MAX_PROCESSES}; plan a smaller version for local-cpux8 or less and measure that"
        )
    captured_as_planned(plan, build_for_plan(model_argument, plan))
    ranks = run_local(plan.world_size, _measure, plan_to_json(plan), model_argument, quiet=True)
    steps = [[spans for spans in step if spans] for step in zip(*ranks, strict=True)]
    return min((_joined(step) for step in steps), key=lambda spans: max(s.end_s for s in spans))


def _measure(_: Report, plan_text: str, model_argument: str) -> list[list[ActionSpan]]:
    """The spans of this rank by step; none where another one stands for its device."""
    plan = plan_from_json(plan_text)
    built = build_for_plan(model_argument, plan, device="cpu")
    captured = captured_as_planned(plan, built)
    compiled = bind(built.model, plan, captured, built.example_inputs, loss_fn=built.loss_fn)
    runner = compiled.runner()
    assert isinstance(runner, PipelineRunner) and isinstance(compiled.program, EmittedPipeline)
    assert compiled.rank_mesh is not None
    device = runner.device
    stands_for_it = sum(compiled.rank_mesh.coords) == device
    found = []
    for _step in range(NUM_STEPS):
        dist.barrier()
        compiled.train_step(built.example_inputs)
        compiled.zero_grad()
        found.append(
            [ActionSpan.of(device, *span) for span in runner.spans] if stands_for_it else []
        )
    return found[1:]


def _joined(devices: Sequence[Sequence[ActionSpan]]) -> tuple[ActionSpan, ...]:
    """The spans of all devices from the start of the first."""
    start_s = min(spans[0].start_s for spans in devices)
    ordered = sorted(devices, key=lambda spans: spans[0].device)
    return tuple(span.later(-start_s) for spans in ordered for span in spans)
