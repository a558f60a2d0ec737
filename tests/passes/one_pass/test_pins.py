"""Pins that strategies keep, and the one that none keeps."""

from meshfold.ir.strategy import UniformStrategy
from meshfold.passes.one_pass.pins import broken_pin, keeps_pins, pinned_values


def test_the_pin_that_cannot_be_kept_is_named() -> None:
    strategies = [UniformStrategy(dp=4), UniformStrategy(dp=2, tp=2, zero=3)]
    assert (
        keeps_pins(strategies[1], {"dp": 2, "zero": 3}) and pinned_values(strategies[0])["tp"] == 1
    )
    assert broken_pin(strategies, {"zero": 3, "dp": 4}, 4) == (
        "pin dp=4 cannot be kept on 4 devices with the other pins; dp can be 2"
    )
