"""A stage of a pipeline that dies or hangs is named by the others, whose gradients stay."""

import pytest
from support.programs.pipeline import captured_model, lose_a_stage, planned, recut

from meshfold.cost_models.pipeline.schedules import Schedule, ScheduleKind
from meshfold.distributed.local_processes import LocalProcessError, run_local
from meshfold.plan_file.io import plan_to_json

LOST = {
    "before": "RankLostError: rank 0 waited for rank 1 in step 1, comparison of what the ranks",
    "within": "StageLostError: stage 0 waited before 0B0 for 1B0 of stage 1 on rank 1",
}


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("how", ["dies", "hangs"])
@pytest.mark.parametrize("when", LOST)
def test_a_lost_stage_is_named(how: str, when: str) -> None:
    base = planned("gpt2", 2, 2, (("microbatches", 4), ("pp", 2), ("tp", 1)))
    plan = recut(base, Schedule(ScheduleKind.ONE_F_ONE_B, 2, 4))
    said: list[str] = []
    arguments = ("gpt2", 2, captured_model("gpt2", 2), plan_to_json(plan), how, when)
    collected = lambda rank, value: said.append(value)  # noqa: E731
    try:
        # The survivor may take longer than a user would want to wait, on a busy machine.
        run_local(2, lose_a_stage, *arguments, on_report=collected, quiet=True, grace_s=60.0)
    except LocalProcessError:
        assert how == "dies"
    (text,) = said
    assert text.startswith(f"True True {LOST[when]}"), text
