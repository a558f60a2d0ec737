"""What test_measured_overlap runs in processes."""

from typing import Any

from meshfold.validation.measure_overlap import _run


def measured(plan_text: str, model_argument: str) -> Any:
    return _run(lambda _: None, plan_text, model_argument)
