"""Optimizers by name: every wrong one, and every pin that one excludes, gets one clear line."""

import pytest

from meshfold.errors import OptionError
from meshfold.ir.optimizers import OF_STATES, OPTIMIZERS, WHOLE_PARAMETERS, check_optimizer
from meshfold.ir.options import CompileOptions


def test_every_name_is_known() -> None:
    assert {name for names in OF_STATES.values() for name in names} | {*WHOLE_PARAMETERS} < {
        *OPTIMIZERS
    }
    for name in OPTIMIZERS:
        check_optimizer(name, {})


@pytest.mark.parametrize(
    ("name", "pins", "message"),
    [
        ("lion", {}, "optimizer 'lion' is unknown; write adamw, .*, momentum or sgd"),
        ("muon", {"states": "bf16"}, "pin states=bf16: optimizer muon has no such states"),
        ("adamw_8bit", {"states": "bf16"}, "pin states=bf16: optimizer adamw_8bit has no such"),
        ("muon", {"zero": 1}, "pin zero=1: optimizer muon looks at whole parameters"),
        ("adafactor", {"layout:a": "tp:0"}, "pin layout:a=tp:0: optimizer adafactor looks at"),
    ],
)
def test_what_cannot_be_is_named(name: str, pins: dict[str, int | str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        check_optimizer(name, pins)


def test_pins_that_leave_parameters_whole_may_stand() -> None:
    check_optimizer("muon", {"zero": 0, "tp": 1, "dp": 8, "layout:a": "replicate"})


def test_a_pin_of_states_names_the_optimizer() -> None:
    assert CompileOptions(pins={"states": "int8"}).optimizer == "adamw_8bit"
    assert CompileOptions(pins={"states": "full"}, optimizer="adamw_fused").optimizer == (
        "adamw_fused"
    )
    assert CompileOptions(optimizer="muon").strategy_pins == WHOLE_PARAMETERS["muon"]
