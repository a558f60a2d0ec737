"""Rows that a mask selects, reduced to losses and written back, as one process computes them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.programs.local_programs import emit_uniform, errors_of_a_step
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.capture.pipeline import capture
from meshfold.errors import CaptureError
from meshfold.ir.strategy import UniformStrategy
from meshfold.validation.float64_mode import float64_everywhere

BATCH, LENGTH, WIDTH, CLASSES = 4, 6, 8, 5

Loss = Callable[["Model", Tensor, Tensor, Tensor], Any]


class Model(nn.Module):
    """loss: of hidden [n, s, WIDTH], labels [n, s] and a target [n, s] with NaN where it lacks."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.norm = nn.LayerNorm(WIDTH)
        self.loss = loss

    def forward(self, x: Tensor, labels: Tensor, target: Tensor) -> Any:
        return self.loss(self, torch.tanh(self.first(x)), labels, target)


def batch_of() -> dict[str, Tensor]:
    """One row has no label, another one all; what a target lacks is NaN."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, CLASSES, (BATCH, LENGTH), generator=generator)
    labels[1, 2:], labels[3], labels[0, 1] = -1, -1, -1
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    target = torch.rand(BATCH, LENGTH, generator=generator, dtype=torch.float64) + 0.1
    return {"x": x, "labels": labels, "target": target.masked_fill(labels < 0, torch.nan)}


def classes(model: Model, hidden: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    chosen = labels != -1
    return F.cross_entropy(model.head(hidden)[chosen], labels[chosen])


def classes_of_masks_made_twice(model: Model, hidden: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    logits = model.head(model.norm(hidden[labels >= 0]))
    wanted = labels[labels >= 0]
    hits = (logits.argmax(-1) == wanted).float().mean()
    return F.cross_entropy(logits, wanted, label_smoothing=0.1) + 0 * hits


def classes_in_a_row(model: Model, hidden: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    active = labels.view(-1) != -1
    log_probs = model.head(hidden).view(-1, CLASSES)[active].log_softmax(-1)
    picked = log_probs.gather(1, labels.view(-1)[active].unsqueeze(1)).squeeze(1)
    return -picked.sum() / active.sum()


def missing(model: Model, hidden: Tensor, _: Tensor, target: Tensor) -> Tensor:
    valid = ~torch.isnan(target)
    return F.smooth_l1_loss(hidden.sum(-1)[valid], target[valid])


def distances(model: Model, hidden: Tensor, _: Tensor, target: Tensor) -> Tensor:
    valid = torch.isfinite(target)
    difference = torch.log(target[valid]) - torch.log(hidden.square().sum(-1)[valid])
    return (difference.pow(2).mean() - 0.5 * difference.mean().pow(2)).sqrt()


def normalised(model: Model, hidden: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    rows = hidden[labels >= 0]
    cosine = F.cosine_similarity(rows, 2 - model.first.weight[0], dim=1)
    return (1 - cosine).sum() + F.normalize(rows, dim=-1).abs().sum(0).max()


def written_back(model: Model, hidden: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    chosen = labels >= 0
    out = torch.zeros_like(hidden)
    out[chosen] = F.gelu(model.first(hidden[chosen]))
    return model.head(out).square().mean()


def chosen_values(model: Model, hidden: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    values = torch.masked_select(model.head(hidden)[..., 0], labels >= 0)
    return values.exp().mean() + values.max() - values[:, None].mean()


def experts_by_masks(model: Model, hidden: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    hidden, ids = hidden.flatten(0, 1), labels.flatten() % 2
    weights = model.head(hidden).softmax(-1)
    out = torch.zeros_like(hidden)
    for e, expert in enumerate((model.first, model.norm)):
        (rows,) = (ids == e).nonzero(as_tuple=True)
        out[rows] += weights[ids == e, e].unsqueeze(-1) * expert(hidden[rows])
    return out.square().mean()


def of_tables(model: Model, hidden: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    before = labels[labels > 0] - 1
    rows = model.head(hidden)[labels > 0]
    if rows.shape[0] == 0 or before.numel() == 0:
        return hidden.sum()
    losses = F.nll_loss(rows.log_softmax(-1), before, reduction="none")
    picked = rows.view(rows.size(0), -1).gather(1, before[:, None])
    return (losses * model.head.bias[before]).mean() + picked.mean()


LOSSES: list[Loss] = [
    *(classes, classes_of_masks_made_twice, classes_in_a_row, missing, distances, normalised),
    *(written_back, chosen_values, experts_by_masks, of_tables),
]


@pytest.mark.parametrize("loss", LOSSES)
def test_rows_of_a_mask_are_those_of_one_process(loss: Loss) -> None:
    torch.manual_seed(0)
    model, batch = Model(loss).double(), batch_of()
    with float64_everywhere():
        captured = capture(model, batch)
    assert any("all rows are computed where a mask" in note for note in captured.graph.notes)
    for strategy in (UniformStrategy(dp=2, zero=3), UniformStrategy(dp=2, tp=2)):
        program = emit_uniform(captured, strategy, BATCH)
        for errors in errors_of_a_step(model, batch, captured, program):
            assert max(errors.values()) < 1e-12


def other_mask(model: Model, hidden: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    return F.cross_entropy(model.head(hidden)[labels >= 1], labels[labels >= 0])


def changed_mask(model: Model, hidden: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    chosen = labels >= 0
    rows = hidden[chosen]
    chosen[0] = False
    return rows.mean()


def changed_labels(model: Model, hidden: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    labels = labels.clone()
    logits = model.head(hidden)[labels >= 0]
    labels[0] = -1
    return F.cross_entropy(logits, labels[labels >= 0])


def over_rows(model: Model, hidden: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    return hidden[labels >= 0].softmax(0).mean()


def counted(model: Model, hidden: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    return torch.cat([hidden[labels >= 0], hidden[labels >= 0]]).mean()


def first_row(model: Model, hidden: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    return hidden[labels >= 0][0].mean()


def broadcast(model: Model, hidden: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    rows = hidden[labels >= 0]
    return (rows * rows.mean(-1)).mean()


@pytest.mark.parametrize(
    "loss",
    [other_mask, changed_mask, changed_labels, over_rows, counted, first_row, broadcast],
)
def test_what_needs_the_number_of_rows_is_refused(loss: Loss) -> None:
    with pytest.raises(CaptureError, match="__getitem__ gives a shape or a number") as caught:
        capture(Model(loss).double(), batch_of())
    assert "test_rows.py" in caught.value.source
