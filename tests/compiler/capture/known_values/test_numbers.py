"""Numbers that forward asks a tensor for: kept and printed, not computed with."""

import math
from typing import Any

import pytest
import torch
from support.programs.linears import Linears, Middle, assert_refused, with_middle
from torch import Tensor

from meshfold.capture.known_values.numbers import number_of, refuse_numbers
from meshfold.capture.pipeline import capture
from meshfold.capture.trace.value_checks import ValueChecks
from meshfold.errors import CaptureError

LOG: list[Any] = []


class Model(Linears):
    """Keeps numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.total, self.calls, self.found = None, 0.0, 0, []


def kept(model: Model, h: Tensor) -> Tensor:
    model.value = round(h.mean().item(), 3)
    LOG.append(h.sum().tolist())
    return h


def averaged(model: Model, h: Tensor) -> Tensor:
    model.calls += 1
    model.total += 2 * h.mean().item()
    model.value = f"{model.total / model.calls:.3f}"
    return h


def formatted(model: Model, h: Tensor) -> Tensor:
    model.value = f"{h.mean():.3f} of {h.max():>8.1e}"
    return h


def in_a_list(model: Model, h: Tensor) -> Tensor:
    model.found.append({"mean": h.mean().item(), "largest": [h.max().item()]})
    return h


def used(model: Model, h: Tensor) -> Tensor:
    return h * math.exp(h.mean().item())


def used_by_torch(model: Model, h: Tensor) -> Tensor:
    return h * torch.tensor(h.mean().item())


def used_in_the_next_call(model: Model, h: Tensor) -> Tensor:
    if isinstance(model.value, float):
        h = h * model.value
    model.value = h.mean().item()
    return h


def asked_in_the_next_call(model: Model, h: Tensor) -> Tensor:
    if model.found and model.found[-1] > 1:
        h = h * 2
    model.found.append(h.mean().item())
    return h


def as_a_float(model: Model, h: Tensor) -> Tensor:
    model.value = float(h.mean())
    return h


def as_an_array(model: Model, h: Tensor) -> Tensor:
    model.value = h.detach().numpy()
    return h


MIDDLES = {
    kept: "",
    averaged: "",
    formatted: "",
    in_a_list: "",
    used: r"Tensor.item gives a shape or a number .*test_numbers.py:",
    used_by_torch: r"Tensor.item gives a shape or a number .*test_numbers.py:",
    used_in_the_next_call: "forward changes what value holds",
    asked_in_the_next_call: "forward changes what found holds",
    as_a_float: r"Tensor.__float__ gives .* write x.item\(\) for a number that is only kept",
    as_an_array: "Tensor.numpy cannot be captured: .*test_numbers.py:",
}


@pytest.mark.parametrize("middle", MIDDLES, ids=lambda f: f.__name__)
def test_numbers_may_be_kept_and_printed(middle: Middle) -> None:
    assert_refused(with_middle(Model, middle), MIDDLES[middle])


def test_a_batch_norm_that_counts_its_batches_is_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4, momentum=None))
    with pytest.raises(CaptureError, match=r"Tensor.__float__ gives .*give batch norms a momentum"):
        capture(model, {"input": torch.randn(8, 4)})


def test_the_plan_says_that_they_are_not_computed() -> None:
    graph = capture(with_middle(Model, averaged), {"x": torch.randn(8, 4)}).graph
    (note,) = [note for note in graph.notes if "numbers of tensors" in note]
    assert "forward keeps are not computed (" in note and "test_numbers.py:" in note
    without = capture(with_middle(Model, lambda _, h: h), {"x": torch.randn(8, 4)}).graph
    assert len(graph.regions[0].graph.ops) == len(without.regions[0].graph.ops)


def test_a_number_is_of_the_type_that_it_would_be() -> None:
    checks = ValueChecks()
    whole, real, truth = (
        number_of(torch.tensor(x), checks, "item", "m.py:1") for x in (3, 0.5, True)
    )
    for number, kind in ((whole, int), (real, float), (truth, bool), (whole * 2, int)):
        assert isinstance(number, kind)
    for number in (whole / 2, 1 + real, 2.0 * whole, round(real), 1 - real, real**2):
        assert isinstance(number, float) and f"{number:.2f}" == str(number) == "?"
    assert (2 - whole).tensor.item() == -1 and (whole / 2).tensor.item() == 1.5


def test_torch_computes_with_none() -> None:
    number = number_of(torch.tensor(3), ValueChecks(), "torch.Tensor.item", "m.py:1")
    refuse_numbers((1, 2.0))
    for call in (lambda: refuse_numbers((1, number)), lambda: torch.ones(2) * number):
        with pytest.raises(CaptureError, match=r"Tensor.item gives .*\(m.py:1\)"):
            call()
