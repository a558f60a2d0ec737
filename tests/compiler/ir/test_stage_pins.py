"""Pins of stages and microbatches, and against them."""

import pytest

from meshfold.ir.options import PinValue
from meshfold.ir.stage_pins import excludes_pipelines, is_pipeline_pinned


@pytest.mark.parametrize(
    ("pins", "asks", "rules_out"),
    [
        ({}, False, False),
        ({"dp": 8, "tp": 4}, False, False),
        ({"pp": 2}, True, False),
        ({"pp": 1, "microbatches": 1}, False, True),
        ({"pp": 2, "microbatches": 1}, True, False),
        ({"schedule": "1f1b"}, True, False),
        ({"micro_chunks": 2}, False, True),
        ({"layout:lm_head=replicate": 1}, False, True),
    ],
)
def test_pins_ask_for_stages_or_rule_them_out(
    pins: dict[str, PinValue], asks: bool, rules_out: bool
) -> None:
    assert is_pipeline_pinned(pins) == asks
    assert excludes_pipelines(pins) == rules_out
