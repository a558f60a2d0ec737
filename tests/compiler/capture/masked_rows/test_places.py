"""Rows taken by where a mask is true."""

from typing import Any

import pytest
import torch
from support.programs.local_programs import emit_uniform, errors_of_a_step
from torch import Tensor, nn
from torch.nn import functional as F

import meshfold
from meshfold.capture.pipeline import capture
from meshfold.errors import CaptureError, ValueCheckError
from meshfold.ir.strategy import UniformStrategy
from meshfold.validation.float64_mode import float64_everywhere

BATCH, CLASSES = 4, 3


class Labelled(nn.Module):
    """The loss of samples with labels, as DeBERTa writes it; without one it is 0."""

    def __init__(self, form: str = "gathered") -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 8), nn.Linear(8, CLASSES)
        self.form = form

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.first(x)))
        index: Any = (labels >= 0).nonzero()
        if self.form == "indexed":
            (index,) = torch.where(labels >= 0)
            return F.cross_entropy(logits[index], labels.index_select(0, index))
        if self.form == "counted":
            return logits.sum() * index.size(0)
        if self.form == "several":
            return logits.sum() if index.size(0) > 1 else logits.mean()
        if index.size(0) > 0:
            chosen = torch.gather(logits, 0, index.expand(index.size(0), logits.size(1)))
            labels = torch.gather(labels, 0, index.view(-1))
            return nn.CrossEntropyLoss()(chosen.view(-1, CLASSES).float(), labels.view(-1))
        return torch.tensor(0).to(logits)


def _batch() -> dict[str, Tensor]:
    return {
        "x": torch.randn(BATCH, 4, generator=torch.Generator().manual_seed(0)),
        "labels": torch.tensor([2, -1, 0, -1]),
    }


class LabelledTokens(nn.Module):
    """The loss of tokens with labels, chosen by both indices at once, as SASRec writes it."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 8), nn.Linear(8, CLASSES)
        self.form = form

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        index = torch.where(labels >= 0)
        rows, places = index
        if self.form == "where":
            return F.cross_entropy(self.head(h)[index], labels[index])
        if self.form == "pair":
            rows, places = (labels >= 0).nonzero(as_tuple=True)
            return F.cross_entropy(self.head(h[rows, places]), labels[rows, places])
        if self.form == "written":
            found = torch.zeros_like(h)
            found[rows, places] = h[rows, places].square()
            return self.head(found).square().mean()
        if self.form == "exchanged":
            return self.head(h)[places, rows].sum()
        return self.head(h)[rows].sum()


def _tokens() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.tensor([[2, -1, 0, -1], [-1, -1, -1, 1], [0, 1, 2, 0], [-1, 2, -1, -1]])
    return {"x": torch.randn(BATCH, 4, 4, generator=generator), "labels": labels}


def assert_as_in_one_process(
    model: nn.Module, batch: dict[str, Tensor], *strategies: UniformStrategy
) -> None:
    batch["x"] = batch["x"].double()
    with float64_everywhere():
        captured = capture(model.double(), batch)
    for strategy in strategies:
        program = emit_uniform(captured, strategy, BATCH)
        for errors in errors_of_a_step(model, batch, captured, program):
            assert max(errors.values()) < 1e-12


@pytest.mark.parametrize("form", ["where", "pair", "written"])
def test_tokens_of_places_are_those_of_one_process(form: str) -> None:
    torch.manual_seed(0)
    assert_as_in_one_process(LabelledTokens(form), _tokens(), UniformStrategy(dp=2, tp=2))


@pytest.mark.parametrize("form", ["exchanged", "rows alone"])
def test_one_of_several_indices_is_refused(form: str) -> None:
    with pytest.raises(CaptureError, match="torch.where gives a shape or a number"):
        capture(LabelledTokens(form), _tokens())


@pytest.mark.parametrize("form", ["gathered", "indexed"])
def test_rows_of_places_are_those_of_one_process(form: str) -> None:
    torch.manual_seed(0)
    strategies = UniformStrategy(dp=2, zero=3), UniformStrategy(dp=2, tp=2)
    assert_as_in_one_process(Labelled(form), _batch(), *strategies)


def test_a_batch_without_a_row_is_refused_by_the_step() -> None:
    batch = _batch()
    options = meshfold.CompileOptions(precision="model")
    compiled = meshfold.compile(Labelled(), "local-cpux1", batch, options=options)
    assert compiled(**batch).isfinite()
    with pytest.raises(ValueCheckError, match="a mask has a row"):
        compiled(x=batch["x"], labels=torch.full((BATCH,), -1))


@pytest.mark.parametrize("form", ["counted", "several"])
def test_how_many_there_are_is_refused(form: str) -> None:
    with pytest.raises(CaptureError, match="nonzero gives a shape or a number") as caught:
        capture(Labelled(form), _batch())
    assert "test_places.py" in caught.value.source
