"""Paths into what a model returns."""

import pytest

from meshfold.errors import OptionError
from meshfold.ir.options import CompileOptions
from meshfold.ir.returns import ALL, Returns, paths_of, summands_of


def test_paths_are_read_one_by_one() -> None:
    assert paths_of(None) == ()
    assert paths_of(1) == ("1",)
    assert summands_of("losses.cls + losses.box") == ("losses.cls", "losses.box")
    assert summands_of(("a", 0)) == ("a", "0") and summands_of(None) == ()
    assert paths_of(("loss", 2)) == ("loss", "2")


@pytest.mark.parametrize("wrong", [True, 1.5, ("loss", None)])
def test_what_is_no_path_is_refused(wrong: object) -> None:
    with pytest.raises(OptionError, match="is no path into what the model returns"):
        CompileOptions(loss=wrong).returns  # type: ignore[arg-type]  # noqa: B018


def test_options_say_what_is_returned() -> None:
    assert CompileOptions().returns == Returns()
    options = CompileOptions(loss=0, outputs=("logits",), sharded_outputs=True)
    assert options.returns == Returns(("0",), ("logits",), sharded=True)
    assert CompileOptions(outputs=ALL).returns.outputs == ALL
    assert CompileOptions(outputs="logits").returns.outputs == ("logits",)
    with pytest.raises(OptionError, match="sharded_outputs: there are no outputs; name some"):
        CompileOptions(sharded_outputs=True)
