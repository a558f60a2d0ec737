"""Predictions of published runs by the pipeline that users call: capture, plan under pins,
refine."""

import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from meshfold.api import batch_size_of
from meshfold.capture.pipeline import Captured, capture
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.errors import InfeasibleError, MeshfoldError
from meshfold.ir.plan import Plan
from meshfold.memory_probe.prober import OpProber
from meshfold.models.config_file import Configuration
from meshfold.models.from_argument import build_model
from meshfold.passes.planner.find import find_plan_for
from meshfold.refine.pipeline import refined
from published.frameworks import Traits
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
        if again := setup.traits.rerun_share:
            pins = dict(setup.options.pins) | {"recompute": "full"}
            full = replace(setup, options=replace(setup.options, pins=pins))
            step_s += again * (_predicted(captured, full)[0] - step_s)
    except NotExpressible as error:
        return Prediction(reason=str(error))
    except MeshfoldError as error:
        return Prediction(reason=f"{type(error).__name__}: {error}".split(";")[0][:100])
    cpu_s = time.process_time() - start
    return Prediction(step_s, peak, peak - reserve, peak <= setup.cluster.memory_bytes, cpu_s)


def _predicted(captured: Captured, setup: Setup) -> tuple[float, float, float]:
    """Seconds of the step; bytes of the peak, and of the reserve in it."""
    plan = fitting(captured, setup)
    peak = peak_of(plan, setup.traits)
    return step_s_of(plan, setup.traits), peak, float(plan.memory.reserve)


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
    if traits.adds_in_products and plan.strategy.microbatches > 1:
        # A program reads 2 bytes and writes 4 to copy a gradient, a product 2 each to add to it and
        # nothing else: 4 less of the 4 that gradients of a microbatch are here.
        device = CostModel(plan.cluster, plan.mesh).device
        rate = device.memory_bytes_per_s * device.memory_efficiency
        saved_s += plan.strategy.microbatches * plan.memory.gradients / rate
    return plan.step_s - saved_s


def planned(captured: Captured, setup: Setup) -> Plan:
    """The plan under the pins of a setup. Raises InfeasibleError where it does not fit."""
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
