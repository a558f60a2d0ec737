"""Batches of fine-tuning in microbatches and stages: padding masks, heads, uneven targets."""

import pytest
from support.models.padded import BATCH, PADDED, padded_model
from support.programs.one_device import difference

from meshfold.capture.pipeline import capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.errors import OptionError
from meshfold.ir.options import CompileOptions
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.planner.find import find_plan_for
from meshfold.validation.float64_mode import float64_everywhere

TOLERANCE = 1e-12
QUICK = ("llama", "classes", "answers")


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in PADDED]
)
def test_microbatches_and_stages_compute_what_one_process_does(name: str) -> None:
    model, batch = padded_model(name)
    assert difference(model, batch, num_microbatches=4, num_stages=3) < TOLERANCE


def test_a_contrastive_loss_has_stages_but_no_microbatches() -> None:
    """Every sample is compared with all others."""
    model, batch = padded_model("clip")
    with float64_everywhere():
        folded = capture(model, batch).graph
    cluster = resolve_cluster("local-cpu", 2)
    plans = {}
    for count in (1, 2):
        options = CompileOptions(pins={"pp": 2, "microbatches": count, "recompute": "none"})
        try:
            plan = find_plan_for(
                folded, cluster, options, model_name="m", batch_size=BATCH, probe=OpProber()
            )
            plans[count] = str(plan.schedule)
        except OptionError as error:
            plans[count] = str(error)
    assert plans[1].endswith("(2 x 1)")
    assert "cannot be split into microbatches: matmul (" in plans[2]
    assert "modeling_clip.py:" in plans[2] and "of all samples at once; plan one" in plans[2]
    assert difference(model, batch, num_microbatches=1, num_stages=2) < TOLERANCE
