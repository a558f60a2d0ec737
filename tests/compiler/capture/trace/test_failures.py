"""What goes wrong while a model is traced is one line that says what to do."""

from types import SimpleNamespace
from typing import Any

import pytest

from meshfold.capture.gradients.inner import InnerGradients
from meshfold.capture.gradients.route import NextStepError, Route
from meshfold.capture.trace.failures import RetraceError, explain_failure
from meshfold.errors import CaptureError
from meshfold.torch_compat.functional_gradients import GRADIENT_IN_VMAP


def _watch(failed: str = "", asked: str = "") -> Any:
    gradients = InnerGradients(Route())
    gradients.asked = asked
    return SimpleNamespace(failed=failed, gradients=gradients)


@pytest.mark.parametrize(
    ("error", "failed", "asked", "text"),
    [
        ("odd\nmore", "Tensor.foo", "", r"^Tensor.foo cannot be captured: odd; write it with ops"),
        ("", "", "", r"^the model cannot be captured: RuntimeError; write it"),
        ("odd", "", "torch.autograd.grad", r"^torch.autograd.grad .*: odd; a gradient inside of"),
        (
            "use functorch",
            "x",
            "",
            r"^torch.func cannot be .* takes a gradient inside of another transform",
        ),
        (GRADIENT_IN_VMAP, "x", "", r"^torch.func cannot be .*vmap; take that of the sum"),
        ("higher order operator", "cond", "", r"compute both sides of a torch.cond"),
        ("'NoneType' object is not", "", "", r"pass it in example_inputs"),
        ("Default process group has not been initialized, please", "", "", r"before torch\.dist"),
        ("no fake implementation", "op", "", r"register one with torch.library.register_fake"),
    ],
)
def test_failures_are_explained(error: str, failed: str, asked: str, text: str) -> None:
    with pytest.raises(CaptureError, match=text), explain_failure(_watch(failed, asked)):
        _raise_in_torch(RuntimeError(error))


def _raise_in_torch(error: Exception) -> None:
    exec("def fail(error):\n    raise error", found := {"__name__": "torch.functional"})
    found["fail"](error)  # type: ignore[operator]


def test_what_a_model_raises_itself_may_be_its_inputs() -> None:
    text = "odd; see whether the model runs on example_inputs without meshfold; if so, write it"
    with pytest.raises(CaptureError, match=text), explain_failure(_watch()):
        raise ValueError("odd")


@pytest.mark.parametrize("error", [CaptureError("x"), RetraceError("x"), NextStepError()])
def test_what_is_explained_passes(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, explain_failure(_watch()):
        raise error
    assert raised.value is error
