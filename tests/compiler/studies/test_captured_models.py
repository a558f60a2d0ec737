"""One MODEL, planned again and again, is captured once per size and precision."""

import pytest

from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.ir.options import CompileOptions
from meshfold.studies import captured_models
from meshfold.studies.captured_models import CapturedModels

MODEL = "support.models.factories:regression"


def test_one_capture_serves_all_device_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = []
    capture = captured_models.capture_model
    monkeypatch.setattr(
        captured_models, "capture_model", lambda *args: captures.append(args) or capture(*args)
    )
    models = CapturedModels(MODEL, default_batch=8)
    two, four = resolve_cluster("local-cpux2"), resolve_cluster("local-cpux4")
    plans = [models.plan(spec, CompileOptions(), batch=8) for spec in (two, four)]
    assert [plan.world_size for plan in plans] == [2, 4]
    assert len(captures) == 1
    assert models.plan(two, CompileOptions(), batch=16).model.batch_size == 16
    assert len(captures) == 2
    assert models.plan(two, CompileOptions(precision="bf16"), batch=8).precision == "bf16"
    assert len(captures) == 3
