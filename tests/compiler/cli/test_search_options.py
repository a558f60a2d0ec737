"""What commands ask of a search."""

import pytest

from meshfold.cli.search_options import compile_options
from meshfold.errors import OptionError
from meshfold.ir.options import CompileOptions

DEFAULTS = {
    "precision": "auto",
    "mode": "auto",
    "memory": None,
    "pin": (),
    "optimizer": "adamw",
    "allow": (),
    "without_rule": (),
    "loss": None,
    "returned": (),
    "fixed_input": (),
}


def test_nothing_asked_is_the_default() -> None:
    assert compile_options(**DEFAULTS) == CompileOptions()  # type: ignore[arg-type]


def test_everything_asked_arrives() -> None:
    asked = {"memory": "16GB", "pin": ("tp=2",), "loss": "l", "optimizer": "adamw_fused"}
    asked |= {"allow": ("offload", "low_precision_states"), "fixed_input": ("grid",)}
    found = compile_options(**{**DEFAULTS, **asked, "returned": ("a", "all")})  # type: ignore[arg-type]
    assert (found.memory_bytes, dict(found.pins), found.loss) == (16 * 10**9, {"tp": 2}, "l")
    assert found.allow_low_precision_states and found.optimizer == "adamw_fused"
    assert found.fixed_inputs == ("grid",)
    assert found.allow_offload and found.outputs == "all"


def test_a_wrong_value_is_refused() -> None:
    with pytest.raises(OptionError, match="16GB or 16GiB"):
        compile_options(**{**DEFAULTS, "memory": "16"})  # type: ignore[arg-type]
