"""What a forward does with gradients is seen, and refused where it would be lost."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshfold.capture.gradients.inner import InnerGradients, NoInnerGradients
from meshfold.capture.gradients.route import NextStepError, Route
from meshfold.errors import CaptureError
from meshfold.torch_compat.fake_tensors import fake_mode


def test_results_without_create_graph_carry_no_gradient() -> None:
    seen, x = InnerGradients(Route()), torch.ones(2, requires_grad=True)
    found = (x * x, None)
    kept = seen.seen(torch.autograd.grad, (), {"create_graph": True}, found, lambda: "m.py:1")
    assert kept == found
    detached, nothing = seen.seen(torch.autograd.grad, (), {}, found, lambda: "m.py:2")
    assert not detached.requires_grad
    assert nothing is None
    assert (seen.asked, seen.source) == ("torch.autograd.grad", "m.py:1")


def test_what_a_trace_does_not_know_takes_the_next_step_and_then_is_refused() -> None:
    seen = InnerGradients(Route())
    with fake_mode():
        unseen = {"lifted": torch.ones(2)}
    seen.refuse_unseen(unseen)
    seen.seen(torch.autograd.grad, (), {}, (), lambda: "m.py:1")
    seen.refuse_unseen({"lifted": torch.ones(2)})
    for _ in range(2):
        with seen.route.traced(), pytest.raises(NextStepError):
            seen.refuse_unseen(unseen)
    with pytest.raises(CaptureError, match=r"goes back through results of ops"):
        seen.refuse_unseen(unseen)


def test_layers_that_are_no_ops_take_no_gradients() -> None:
    x = torch.ones(2, requires_grad=True)
    with NoInnerGradients(), pytest.raises(CaptureError, match="forward calls torch.autograd.grad"):
        torch.autograd.grad(x.sum(), x)


def _by_backward(seen: InnerGradients, model: nn.Linear, x: Tensor) -> None:
    model(x).sum().backward()
    seen.refuse_accumulated(model, [x])


def _of_what_is_kept(seen: InnerGradients, model: Any, x: Tensor) -> None:
    model.kept = x
    seen.seen(torch.Tensor.requires_grad_, (x,), {}, x, str)
    seen.refuse_kept(model)


@pytest.mark.parametrize(
    ("does", "text"),
    [
        (_by_backward, r"forward writes to \.grad of weight"),
        (_of_what_is_kept, r"requires_grad_ on a tensor that the model keeps"),
    ],
)
def test_gradients_that_would_be_lost(does: Callable[..., None], text: str) -> None:
    with pytest.raises(CaptureError, match=text):
        does(InnerGradients(Route()), nn.Linear(2, 1), torch.ones(3, 2))
