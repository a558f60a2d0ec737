"""What masks select, in ops of fixed shape: targets of CTC losses, with the reductions of torch on
every rank, and the last <eos> of each row."""

from typing import Any

import pytest
import torch
from support.programs.local_programs import emit_uniform, errors_of_a_step
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.capture.pipeline import capture
from meshfold.errors import CaptureError, ValueCheckError
from meshfold.ir.strategy import UniformStrategy
from meshfold.ops.reference_interpreter import run_graph
from meshfold.validation.float64_mode import float64_everywhere

BATCH, STEPS, LABELS, CLASSES = 4, 10, 4, 6


class Speech(nn.Module):
    """Labels are -100 where there are none, at the end of a row or in between."""

    def __init__(self, reduction: str, in_a_row: bool) -> None:
        super().__init__()
        self.hidden = nn.Linear(4, 8)
        self.head = nn.Linear(8, CLASSES)
        self.options: dict[str, Any] = {"reduction": reduction, "zero_infinity": True}
        self.in_a_row = in_a_row

    def forward(self, x: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
        log_probs = self.head(torch.tanh(self.hidden(x))).log_softmax(-1).transpose(0, 1)
        mask = labels >= 0
        targets = labels.masked_select(mask) if self.in_a_row else labels
        loss = F.ctc_loss(log_probs, targets, lengths, mask.sum(-1), **self.options)
        return loss.square().mean()  # type: ignore[no-any-return]


def batch_of(in_a_row: bool) -> dict[str, Tensor]:
    """Lengths differ from row to row; one row has no label, one more than it has steps."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(1, CLASSES, (BATCH, LABELS), generator=generator)
    labels[1, 2:], labels[3] = -100, -100
    if in_a_row:
        labels[2, 0] = -100
    x = torch.randn(BATCH, STEPS, 4, generator=generator, dtype=torch.float64)
    return {"x": x, "lengths": torch.tensor([2, 10, 9, 7]), "labels": labels}


@pytest.mark.parametrize(
    ("reduction", "in_a_row"), [("mean", True), ("mean", False), ("sum", True), ("none", False)]
)
def test_a_ctc_loss_is_that_of_one_process(reduction: str, in_a_row: bool) -> None:
    torch.manual_seed(0)
    model, batch = Speech(reduction, in_a_row).double(), batch_of(in_a_row)
    with float64_everywhere():
        captured = capture(model, batch)
    for strategy in (UniformStrategy(dp=2, zero=3), UniformStrategy(dp=2, tp=2)):
        program = emit_uniform(captured, strategy, BATCH)
        for errors in errors_of_a_step(model, batch, captured, program):
            assert max(errors.values()) < 1e-12


def test_the_batch_is_sharded() -> None:
    model, batch = Speech("mean", False).double(), batch_of(False)
    with float64_everywhere():
        captured = capture(model, batch)
    program = emit_uniform(captured, UniformStrategy(dp=2), BATCH)
    (region,) = captured.graph.regions
    number = [op.target for op in region.graph.ops].index("meshfold.ctc_loss.default")
    (losses,) = program.typings[0].ops[number].outputs
    assert [t.kind for t in losses][:1] == ["S"]


@pytest.mark.parametrize("use", [lambda s: s.cumsum(0), lambda s: s.unique(), len, lambda s: s[0]])
def test_what_needs_the_number_of_selected_labels_is_refused(use: Any) -> None:
    class Uses(nn.Module):
        def forward(self, labels: Tensor) -> Any:
            return use(labels.masked_select(labels > 0)) * labels.sum()

    with pytest.raises(CaptureError, match="masked_select gives a shape or a number") as caught:
        capture(Uses(), {"labels": torch.ones(2, 3, dtype=torch.long)})
    assert "test_selections.py" in caught.value.source


class ByLastEnd(nn.Module):
    """Classifies rows by their last <eos>, as BART and T5 do. is_checked: that rows have
    equally many; whole: an index that names all dims."""

    def __init__(self, is_checked: bool = True, whole: bool = True) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 3)
        self.is_checked, self.whole = is_checked, whole

    def chosen(self, hidden: Tensor, ends: Tensor) -> Tensor:
        rows = hidden[ends, :] if self.whole else hidden[ends]
        assert rows.shape[0] // len(hidden) >= 1
        each = rows.view(hidden.size(0), -1, hidden.size(-1))
        return each[:, -1, :] if self.whole else each[:, -1]

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = torch.tanh(self.embedding(ids))
        ends = ids.eq(2)
        if self.is_checked:
            torch._check(torch.unique_consecutive(ends.sum(1)).numel() == 1, lambda: "uneven")
        return F.cross_entropy(self.head(self.chosen(hidden, ends)), labels)


def rows_with_ends() -> dict[str, Tensor]:
    """Two ends in each row, at other places."""
    ids = torch.full((BATCH, 6), 5)
    for row, ends in enumerate(((0, 5), (1, 2), (3, 4), (0, 1))):
        ids[row, ends] = 2
    return {"ids": ids, "labels": torch.tensor([0, 1, 2, 0])}


@pytest.mark.parametrize("whole", [True, False])
def test_the_last_end_of_each_row_is_that_of_one_process(whole: bool) -> None:
    torch.manual_seed(0)
    model, batch = ByLastEnd(whole=whole).double(), rows_with_ends()
    with float64_everywhere():
        captured = capture(model, batch)
    assert any("torch.unique_consecutive" in note for note in captured.graph.notes)
    for strategy in (UniformStrategy(dp=2, zero=3), UniformStrategy(dp=2, tp=2)):
        program = emit_uniform(captured, strategy, BATCH)
        for errors in errors_of_a_step(model, batch, captured, program):
            assert max(errors.values()) < 1e-12


class Uneven(ByLastEnd):
    def __init__(self) -> None:
        super().__init__(is_checked=False)


class First(ByLastEnd):
    def chosen(self, hidden: Tensor, ends: Tensor) -> Tensor:
        return hidden[ends].view(hidden.size(0), -1, hidden.size(-1))[:, 0]


class Flat(ByLastEnd):
    def chosen(self, hidden: Tensor, ends: Tensor) -> Tensor:
        return hidden[ends].view(-1, hidden.size(-1))[-1:]


class Counted(ByLastEnd):
    def chosen(self, hidden: Tensor, ends: Tensor) -> Tensor:
        return hidden[ends].mean(0, keepdim=True)


@pytest.mark.parametrize("model", [Uneven, First, Flat, Counted])
def test_rows_that_a_mask_selects_are_for_nothing_else(model: type[ByLastEnd]) -> None:
    with pytest.raises(CaptureError, match="gives a shape or a number") as caught:
        capture(model(), rows_with_ends())
    assert "test_selections.py" in caught.value.source


class Placing(nn.Module):
    """Puts features of images among those of a text, after it has counted their places, as models
    of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.vision = nn.Embedding(9, 4), nn.Linear(4, 4)

    def forward(self, ids: Tensor, images: Tensor) -> Tensor:
        x, features = self.embed(ids), self.vision(images)
        mask = (ids == 0).unsqueeze(-1).expand_as(x)
        if x[mask].numel() != features.numel():
            raise ValueError("image features and image tokens do not match")
        return x.masked_scatter(mask, features).square().mean()


def test_places_are_counted_in_a_check() -> None:
    ids = torch.tensor([[0, 0, 3, 4], [5, 0, 6, 0]])
    model, images = Placing(), torch.randn(4, 4)
    captured = capture(model, {"ids": ids, "images": images}, value_checks="run")
    assert any("is run in every step (test_selections" in note for note in captured.graph.notes)

    def loss(ids: Tensor) -> Tensor:
        batch = {"ids": ids, "images": images}
        parameters = dict(model.named_parameters())
        (made,) = run_graph(captured.graph, parameters, {}, captured.constants, batch).values()
        return made

    torch.testing.assert_close(loss(ids), model(ids, images))
    with pytest.raises(ValueCheckError, match=r"x\[mask\].numel\(\) != features.numel\(\)"):
        loss(ids.clamp(min=1))
