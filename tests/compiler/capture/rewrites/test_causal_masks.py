"""Masks of attention that are proven to be causal, or to hide nothing; and those that are not."""

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models.hugging_face import tiny_model
from torch import Tensor, nn

from meshfold.capture.pipeline import Captured, capture
from meshfold.capture.rewrites import causal_masks as capture_masks
from meshfold.capture.rewrites.causal_masks import ATTENTION, Known, Pattern
from meshfold.capture.rewrites.known_values import computed
from meshfold.capture.trace.raw_program import Key, RawOp
from meshfold.ir.op_graph import Op
from meshfold.ops.reference_interpreter import run_graph
from meshfold.validation.float64_mode import float64_everywhere

BATCH, HEADS, ROWS, WIDTH = 2, 3, 6, 4
Make = Callable[[Tensor], Tensor]


class Attention(nn.Module):
    """Attention under the mask that a function makes of the batch."""

    def __init__(self, mask: Make, keys: int = ROWS) -> None:
        super().__init__()
        self.mask = mask
        self.project = nn.Linear(WIDTH, WIDTH).double()
        self.register_buffer("flags", torch.ones(ROWS, ROWS, dtype=torch.bool).tril())
        self.keys = keys

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(x)
        other = y[:, :, : self.keys]
        mask = self.flags if self.mask is buffered else self.mask(x)
        return F.scaled_dot_product_attention(y, other, other, mask).square().sum()


def positions(x: Tensor) -> Tensor:
    return torch.arange(x.shape[2], device=x.device)


def triangle(x: Tensor) -> Tensor:
    return torch.ones(ROWS, ROWS, dtype=torch.bool, device=x.device).tril()


def upper(x: Tensor) -> Tensor:
    return ~torch.ones(ROWS, ROWS, device=x.device).triu(1).bool()


def keys_up_to(x: Tensor) -> Tensor:
    line = positions(x)
    return (line[None, :] <= line[:, None])[None, None].expand(BATCH, 1, ROWS, ROWS)


def rows_from(x: Tensor) -> Tensor:
    line = positions(x) + 3
    return line[:, None] >= line[None, :]


def keys_before_next(x: Tensor) -> Tensor:
    line = positions(x)
    return line[None, :] < line[:, None] + 1


def of_one_document(x: Tensor) -> Tensor:
    document = torch.zeros(ROWS, dtype=torch.long, device=x.device)
    return keys_up_to(x) & (document[:, None] == document[None, :])


def of_documents_by_position(x: Tensor) -> Tensor:
    """As transformers looks for documents that were packed into a row: there are none."""
    return keys_up_to(x) & _same_document(positions(x)[None].expand(BATCH, ROWS))


def _same_document(places: Tensor) -> Tensor:
    jumps = torch.diff(places, prepend=places[:, :1] - 1, dim=-1) != 1
    document = jumps.cumsum(-1)
    return document.reshape(BATCH, 1, ROWS, 1) == document.reshape(BATCH, 1, 1, ROWS)


def everything(x: Tensor) -> Tensor:
    line = positions(x)
    return line[None, :] >= line[:, None] - ROWS


def window(x: Tensor) -> Tensor:
    line = positions(x)
    return keys_up_to(x) & (line[None, :] > line[:, None] - 3)


def two_documents(x: Tensor) -> Tensor:
    document = positions(x) // 4
    return keys_up_to(x) & (document[:, None] == document[None, :])


def packed_in_one_row(x: Tensor) -> Tensor:
    """The second row starts anew, the first does not: no row stands for all."""
    places = positions(x)[None].expand(BATCH, ROWS)
    starts = torch.tensor([ROWS, 3], device=x.device)[:, None]
    return keys_up_to(x) & _same_document(places % starts)


def strictly(x: Tensor) -> Tensor:
    line = positions(x)
    return line[None, :] <= (line[:, None] - 1).clamp(min=0)


def of_batch(x: Tensor) -> Tensor:
    return keys_up_to(x) & (x[:, :1, :, :1] > -100.0).transpose(2, 3)


def reversed_rows(x: Tensor) -> Tensor:
    return keys_up_to(x).flip(-1)


def drawn(x: Tensor) -> Tensor:
    return torch.rand(ROWS, ROWS, device=x.device) > -1.0


def as_numbers(x: Tensor) -> Tensor:
    return torch.where(triangle(x), 0.0, float("-inf")).double()


def buffered(x: Tensor) -> Tensor:
    raise AssertionError("a buffer is not made")


CAUSAL = (
    triangle,
    upper,
    keys_up_to,
    rows_from,
    keys_before_next,
    of_one_document,
    of_documents_by_position,
)
OTHERS = (
    window,
    two_documents,
    packed_in_one_row,
    strictly,
    of_batch,
    reversed_rows,
    as_numbers,
    buffered,
)


@pytest.fixture(params=[2**22, 8], ids=["computed", "as patterns"])
def largest(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Numbers that may be computed: all, or lines alone."""
    monkeypatch.setattr(capture_masks, "LARGEST", request.param)
    return int(request.param)


def captured(mask: Make, keys: int = ROWS) -> tuple[Captured, Op]:
    model = Attention(mask, keys)
    x = torch.randn(BATCH, HEADS, ROWS, WIDTH, dtype=torch.float64)
    found = capture(model, {"x": x})
    (op,) = (
        op for region in found.graph.regions for op in region.graph.ops if op.target == ATTENTION
    )
    buffers = dict(model.named_buffers())
    parameters = dict(model.named_parameters())
    made = run_graph(found.graph, parameters, buffers, found.constants, {"x": x})
    if mask is not drawn:
        torch.testing.assert_close(*made.values(), model(x), rtol=1e-12, atol=1e-12)
    return found, op


def is_causal(op: Op) -> bool:
    return dict(op.kwargs).get("is_causal", False) is True


@pytest.mark.parametrize("mask", CAUSAL)
def test_a_triangle_is_causal(mask: Make, largest: int) -> None:
    if mask in (triangle, upper) and largest == 8:
        pytest.skip("made whole")
    _, op = captured(mask)
    assert is_causal(op) and len(op.operands) == 3


def test_what_hides_nothing_is_no_mask(largest: int) -> None:
    _, op = captured(everything)
    assert len(op.operands) == 3 and not is_causal(op)


@pytest.mark.parametrize("mask", OTHERS)
def test_any_other_mask_stays(mask: Make, largest: int) -> None:
    _, op = captured(mask)
    assert len(op.operands) == 4 and not is_causal(op)


def test_flags_that_are_drawn_are_not_known() -> None:
    _, op = captured(drawn)
    assert len(op.operands) == 4


def test_with_fewer_keys_than_rows_a_triangle_is_another() -> None:
    _, op = captured(lambda x: triangle(x)[:, :4], keys=4)
    assert len(op.operands) == 4


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_models_without_padding_are_causal_and_those_with_are_not(family: str) -> None:
    model, batch = tiny_model(family)
    padding = torch.ones_like(batch["input_ids"])
    for inputs, wanted in ((batch, True), ({**batch, "attention_mask": padding}, False)):
        with float64_everywhere():
            found = capture(model, inputs)
        ops = [op for r in found.graph.regions for op in r.graph.ops if op.target == ATTENTION]
        assert ops and all(is_causal(op) == wanted for op in ops)


@settings(deadline=None, max_examples=300)
@given(
    st.sampled_from(["le", "lt", "ge", "gt", "eq"]),
    st.lists(st.integers(-2, 6), min_size=1, max_size=4),
    st.lists(st.integers(-2, 6), min_size=1, max_size=4),
    st.booleans(),
)
def test_a_comparison_is_what_its_flags_are(
    name: str, keys: list[int], rows: list[int], keys_first: bool
) -> None:
    line, column = torch.tensor(keys)[None, :], torch.tensor(rows)[:, None]
    pair = (line, column) if keys_first else (column, line)
    flags = getattr(torch, name)(*pair)
    found = capture_masks._compared(name, *pair)
    square = torch.ones(len(rows), len(keys), dtype=torch.bool)
    if found is Pattern.ALL:
        assert bool(flags.all())
    elif found is Pattern.CAUSAL:
        assert torch.equal(flags, square.tril()) and len(rows) == len(keys)
    else:
        assert not flags.all()
        is_sorted = keys == sorted(keys)
        assert not (is_sorted and len(rows) == len(keys) and torch.equal(flags, square.tril()))


ROW_OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "aten.ne.Scalar": lambda x, y: x != 1,
    "aten.eq.Scalar": lambda x, y: x == 1,
    "aten.add.Tensor": lambda x, y: x + y,
    "aten.cumsum.default": lambda x, y: x.cumsum(1),
    "aten.diff.default": lambda x, y: torch.diff(x, prepend=y[:, :1], dim=1),
    "aten.slice.Tensor": lambda x, y: x[:, 1:3],
    "aten.reshape.default": lambda x, y: x.reshape(x.shape[0], 1, -1, 1),
}
ALONG_ROWS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x.cumsum(0),
    lambda x: torch.diff(x, dim=0, prepend=x[:1] - 1),
    lambda x: x[1:],
    lambda x: x.reshape(-1),
    lambda x: x[:1].reshape(2, 2) + 1,
)


class Numbers(nn.Module):
    """Attention under flags that numbers of the batch's rows decide."""

    def __init__(self, make: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.make = make
        self.project = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(x)
        row = torch.arange(4)[None].expand(3, 4)
        made = self.make(row, row + 1)
        flags = made.reshape(-1)[:1].expand(ROWS, ROWS) == made.reshape(-1)[:1]
        return F.scaled_dot_product_attention(y, y, y, flags).square().sum()


@pytest.mark.parametrize("name", ROW_OPS)
def test_what_is_made_of_one_row_is_what_all_rows_make(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, Tensor] = {}
    original = capture_masks._by_first_row

    def spied(op: RawOp, shape: tuple[int, ...], known: Mapping[Key, Known]) -> Tensor | None:
        made = original(op, shape, known)
        if made is not None:
            found[op.target] = made
        return made

    monkeypatch.setattr(capture_masks, "_by_first_row", spied)
    capture(Numbers(ROW_OPS[name]), {"x": torch.randn(BATCH, HEADS, ROWS, WIDTH).double()})
    row = torch.arange(4)[None].expand(3, 4)
    assert torch.equal(found[name], ROW_OPS[name](row, row + 1))
    assert found[name].stride(0) == 0


@pytest.mark.parametrize("make", ALONG_ROWS)
def test_what_works_along_the_rows_is_not_made_of_one(
    make: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong: list[str] = []
    original = capture_masks._by_first_row

    def spied(op: RawOp, shape: tuple[int, ...], known: Mapping[Key, Known]) -> Tensor | None:
        made = original(op, shape, known)
        expected = computed(op, known)
        if made is not None and (expected is None or not torch.equal(made, expected)):
            wrong.append(op.target)
        return made

    monkeypatch.setattr(capture_masks, "_by_first_row", spied)
    model = Numbers(lambda x, y: make(x))
    capture(model, {"x": torch.randn(BATCH, HEADS, ROWS, WIDTH).double()})
    assert not wrong
