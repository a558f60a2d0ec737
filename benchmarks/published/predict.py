"""Predictions of published runs by the pipeline that users call: capture, plan under pins,
refine."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from meshfold.api import batch_size_of
from meshfold.capture.pipeline import Captured, capture
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.cost_models.pipeline.makespan import StageTimes, device_ends_s
from meshfold.cost_models.pipeline.schedules import Schedule
from meshfold.errors import InfeasibleError, MeshfoldError
from meshfold.ir.plan import Plan
from meshfold.memory_probe.prober import OpProber
from meshfold.models.config_file import Configuration
from meshfold.models.from_argument import build_model
from meshfold.passes.planner.find import find_plan_for
from meshfold.refine.pipeline import refined
from published.even_stages import even_stages
from published.frameworks import Traits, without_gradients
from published.memory import OF_MEGATRON, measured_bytes
from published.runs import Run
from published.setup import NotExpressible, Setup, Shape, setup_of
from published.stand_ins import fused_kernels

AMPLE_BYTES = 10**15
"""A budget under which nothing is refused, for the step time of runs that would be."""


@dataclass(frozen=True)
class Prediction:
    """What meshfold says of a run. reason: why it says nothing."""

    step_s: float | None = None
    """The headline: simulated where the plan has a simulated step."""
    peak_bytes: float | None = None
    """Of the stage that needs most."""
    allocated_bytes: float | None = None
    """peak_bytes without the reserve."""
    fits: bool | None = None
    """In the memory of the run's device."""
    plan_cpu_s: float = 0.0
    reason: str = ""


def predicted(run: Run) -> Prediction:
    """The prediction, or the reason why there is none."""
    try:
        setup = setup_of(run)
        captured = captured_shape(setup.shape)
        start = time.process_time()
        step_s, peak, reserve = _predicted(captured, setup)
        allocated = peak - reserve
        if run.peak_mem_gib is not None and run.framework.startswith(OF_MEGATRON):
            allocated = measured_bytes(fitting(captured, setup), run)
        if again := setup.traits.rerun_share:
            pins = dict(setup.options.pins) | {"recompute": "full"}
            full = replace(setup, options=replace(setup.options, pins=pins))
            step_s += again * (_predicted(captured, full)[0] - step_s)
    except NotExpressible as error:
        return Prediction(reason=str(error))
    except MeshfoldError as error:
        return Prediction(reason=f"{type(error).__name__}: {error}".split(";")[0][:100])
    cpu_s = time.process_time() - start
    return Prediction(step_s, peak, allocated, peak <= setup.cluster.memory_bytes, cpu_s)


def _predicted(captured: Captured, setup: Setup) -> tuple[float, float, float]:
    """Seconds of the step; bytes of the peak, and of the reserve in it."""
    plan = fitting(captured, setup)
    peak = peak_of(plan, setup.traits)
    return in_framework_s(plan, captured, setup), peak, float(plan.memory.reserve)


def in_framework_s(plan: Plan, captured: Captured, setup: Setup) -> float:
    """Seconds of the step of the plan under the pins of a setup, in its framework. Where all is
    recomputed, forwards are issued faster, and head and loss run once; or the whole last stage."""
    step_s = step_s_of(plan, setup.traits)
    if setup.options.pins["recompute"] != "full":
        return step_s
    issued = fitting(captured, replace(setup, cluster=without_gradients(setup.cluster)))
    faster_s = [
        max(0.0, a - b) for a, b in zip(_forwards_s(plan), _forwards_s(issued), strict=True)
    ]
    kept_s = plan.regions[-1].forward_s
    if setup.traits.keeps_last_stage:
        pins = dict(setup.options.pins) | {"recompute": "none"}
        kept = replace(setup, options=replace(setup.options, pins=pins))
        kept_s = _last_backward_s(plan) - _last_backward_s(fitting(captured, kept))
        faster_s[-1] = 0.0
    return step_s - saved_s(plan, faster_s, kept_s)


def _forwards_s(plan: Plan) -> list[float]:
    """Of each stage, for one microbatch."""
    costs = [stage.costs for stage in plan.stages]
    return [plan.time.forward_s if c is None else c.forward_s for c in costs]


def _last_backward_s(plan: Plan) -> float:
    """Of the last stage, for one microbatch; of a step without, with all that is not forward."""
    costs = plan.stages[-1].costs
    return plan.step_s - plan.time.forward_s if costs is None else costs.backward_s


def saved_s(plan: Plan, faster_s: Sequence[float], kept_s: float) -> float:
    """Seconds by which a step is shorter where forwards of each stage are, by faster_s for each
    microbatch, and the backward of the last one by kept_s: none, where another stage decides."""
    costs = [stage.costs for stage in plan.stages if stage.costs is not None]
    if not plan.schedule or not costs:
        return sum(faster_s) + kept_s
    forward_s = [c.forward_s for c in costs]
    backward_s = [c.backward_s for c in costs]
    less_s = [f - faster for f, faster in zip(forward_s, faster_s, strict=True)]
    times = (
        StageTimes.build(forward_s, backward_s),
        StageTimes.build(less_s, [*backward_s[:-1], backward_s[-1] - kept_s]),
    )
    before_s, after_s = (device_ends_s(Schedule.parse(plan.schedule), t).max() for t in times)
    return float(before_s - after_s)


def fitting(captured: Captured, setup: Setup) -> Plan:
    """The plan, on devices with ample memory where it does not fit."""
    try:
        return planned(captured, setup)
    except InfeasibleError:
        ample = replace(setup.options, memory_bytes=AMPLE_BYTES)
        return planned(captured, replace(setup, options=ample))


def peak_of(plan: Plan, traits: Traits) -> float:
    """Bytes of the peak of a plan, in a framework with these traits: of the stage that needs most,
    what it keeps changes as all of a microbatch does."""
    saved = sum(region.num_instances * region.saved_bytes for region in plan.regions)
    kept = (traits.score_bytes - traits.regathered_bytes) / max(saved, 1)
    activations = plan.memory.activations + plan.memory.loss
    gradients = (1 - traits.gradient_share) * plan.memory.gradients
    return plan.memory.peak - gradients + max(-1.0, kept) * activations


def step_s_of(plan: Plan, traits: Traits) -> float:
    """Seconds of the step of a plan, in a framework with these traits."""
    saved_s = traits.hidden_tp_share * plan.time.communication_s.get("tp", 0.0)
    microbatches = plan.strategy.microbatches
    if traits.less_to_add and microbatches > 1:
        device = CostModel(plan.cluster, plan.mesh).device
        all_s = plan.memory.gradients / (device.memory_bytes_per_s * device.memory_efficiency)
        saved_s += (microbatches - 1) * traits.less_to_add * all_s
        if traits.adds_16_bits:
            # A product that reads and writes a sum of 2 bytes in place of a result of 2 moves 2
            # more, of 4 bytes 6 more: 4 less of the 4 that gradients of a microbatch are here.
            saved_s += microbatches * all_s
    return plan.step_s - saved_s


def planned(captured: Captured, setup: Setup) -> Plan:
    """The plan under the pins of a setup. Raises InfeasibleError where it does not fit."""
    with even_stages() if setup.has_even_stages else nullcontext():
        plan = find_plan_for(
            captured.graph,
            setup.cluster,
            setup.options,
            model_name="published run",
            batch_size=batch_size_of(captured),
            probe=OpProber(),
        )
    return refined(plan, captured.graph, setup.options)


@lru_cache(maxsize=8)
def captured_shape(shape: Shape) -> Captured:
    """What is planned, of the last few shapes."""
    configuration = Configuration(Path("published-run.json"), dict(shape.fields))
    with fused_kernels(dict(shape.fields)) if shape.is_fused else nullcontext():
        built = build_model(configuration, batch=shape.batch, sequence=shape.sequence)
        return capture(built.model, built.example_inputs, precision=shape.precision)
