"""The captured program of a model that a plan was made for."""

from meshfold.api import check_fingerprint
from meshfold.capture.known_values.fixed_inputs import fixed_by
from meshfold.capture.pipeline import Captured, capture
from meshfold.ir.plan import Plan
from meshfold.models.from_argument import BuiltModel


def captured_as_planned(plan: Plan, built: BuiltModel) -> Captured:
    """The captured model. Raises PlanMismatchError if it is not the one that was planned."""
    captured = captured_alike(plan, built)
    check_fingerprint(plan, captured)
    return captured


def captured_alike(plan: Plan, built: BuiltModel) -> Captured:
    """Any model, captured as the one that was planned."""
    return capture(
        built.model,
        built.example_inputs,
        precision=plan.precision,
        returns=plan.model.returns,
        loss_fn=built.loss_fn,
        rules=built.rules,
        fixed_inputs=fixed_by(plan, built.example_inputs),
    )
