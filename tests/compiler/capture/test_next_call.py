"""What the first call of forward leaves for the next: caches of what every step computes alike are
captured, anything else that the next call reads is refused."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.programs.linears import (
    Linears,
    Middle,
    assert_refused,
    assert_trains_alike,
    captured_line,
    with_middle,
)
from torch import Tensor, nn

IN_GLOBALS: dict[str, Tensor] = {}


class Table:
    """An object of the user that keeps a table."""

    def __init__(self) -> None:
        self.values: Tensor | None = None

    def of(self, width: int) -> Tensor:
        if self.values is None:
            self.values = torch.arange(width).float().cos()
        return self.values


class Model(Linears):
    """Keeps caches in many places."""

    on_type: dict[int, Tensor] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.mask: Tensor | None = None
        self.pair: tuple[Tensor, Tensor] | None = None
        self.cached_size, self.by_size, self.table = 0, {}, Table()
        self.register_buffer("later", None, persistent=False)
        self.register_buffer("longer", torch.zeros(0), persistent=False)
        self.kept: Tensor | None = None
        self._tables: dict[Any, Tensor] = {}
        self.lstm = nn.LSTM(4, 4)

    @functools.cached_property
    def window(self) -> Tensor:
        return torch.hann_window(4)


def mask_of_a_size(model: Model, h: Tensor) -> Tensor:
    size = h.shape[-1]
    if model.mask is None or model.mask.shape[0] != size:
        model.mask = torch.triu(torch.full((size, size), -1.0), 1)
    return h @ model.mask


def table_of_a_buffer(model: Model, h: Tensor) -> Tensor:
    """As rotary embeddings do; None as it is would fail in the next call."""
    if model.cached_size != h.shape[-1]:
        model.cached_size = h.shape[-1]
        angles = torch.outer(torch.arange(4).to(h), model.factor)
        model.pair = angles.cos().to(h.dtype), angles.sin().to(h.dtype)
    cos, sin = model.pair
    return h @ cos.to(h.dtype) + h @ sin[:4].type_as(h)


def by_size(model: Model, h: Tensor) -> Tensor:
    if h.shape[-1] not in model.by_size:
        model.by_size[h.shape[-1]] = [torch.linspace(0, 1, h.shape[-1])]
    return h * model.by_size[h.shape[-1]][0]


def in_an_object(model: Model, h: Tensor) -> Tensor:
    return h * model.table.of(h.shape[-1])


def on_the_class(model: Model, h: Tensor) -> Tensor:
    if Model.on_type is None:
        Model.on_type = {4: torch.arange(4).float()}
    return h + Model.on_type[4]


def cached_property(model: Model, h: Tensor) -> Tensor:
    return h * model.window


def registered_later(model: Model, h: Tensor) -> Tensor:
    if model.later is None:
        model.register_buffer("later", torch.arange(4).float(), persistent=False)
    return h + model.later


def grown_buffer(model: Model, h: Tensor) -> Tensor:
    if model.longer.shape[0] < h.shape[-1]:
        model.longer = torch.arange(h.shape[-1]).float()
    return h + model.longer


def sliced_and_detached(model: Model, h: Tensor) -> Tensor:
    if model.kept is None or len(model.kept) < 4:
        table = torch.zeros(4)
        table[0::2] = torch.arange(2).float().sin()
        model.kept = table
    return h + model.kept[:4].detach()


def in_private(model: Model, h: Tensor) -> Tensor:
    key = h.shape[-1], h.dtype
    if key not in model._tables:
        model._tables[key] = torch.arange(h.shape[-1]).float()
    return h + model._tables[key]


def beside_an_lstm(model: Model, h: Tensor) -> Tensor:
    """Which sets its own list of weights anew."""
    return mask_of_a_size(model, model.lstm(h)[0])


def statistics_beside(model: Model, h: Tensor) -> Tensor:
    """A buffer that is written, and what is kept to be looked at."""
    model.history.copy_(h.detach().mean(0, keepdim=True))
    model.kept = h.detach()
    return mask_of_a_size(model, h) + model.history


def of_the_input(model: Model, h: Tensor) -> Tensor:
    if model.kept is None:
        model.kept = h.detach().mean(0)
    return h - model.kept


def of_a_parameter(model: Model, h: Tensor) -> Tensor:
    if not model.by_size:
        model.by_size[0] = model.first.weight.detach().norm()
    return h / model.by_size[0]


def of_a_draw(model: Model, h: Tensor) -> Tensor:
    if model.kept is None:
        model.kept = torch.randn(4)
    return h + model.kept


def of_a_written_buffer(model: Model, h: Tensor) -> Tensor:
    if model.kept is None:
        model.kept = model.factor * 2
    model.factor.mul_(1.5)
    return h + model.kept


def counted_in_a_tensor(model: Model, h: Tensor) -> Tensor:
    model.kept = torch.zeros(4) if model.kept is None else model.kept + 1
    return h * model.kept


def other_in_the_next_call(model: Model, h: Tensor) -> Tensor:
    if model.kept is None:
        model.kept = torch.ones(4)
        return h * model.kept
    return h * (model.kept + 1)


def buffer_of_the_input(model: Model, h: Tensor) -> Tensor:
    if model.later is None:
        model.register_buffer("later", h.detach().mean(0), persistent=False)
    return h + model.later


def grown_of_the_input(model: Model, h: Tensor) -> Tensor:
    if not len(model.longer):
        model.longer = h.detach().mean(0)
    return h + model.longer


def written_in_place(model: Model, h: Tensor) -> Tensor:
    if model.kept is None:
        model.kept = torch.ones(4)
    else:
        model.kept.add_(1)
    return h * model.kept


def branches_on_values(model: Model, h: Tensor) -> Tensor:
    if model.kept is None:
        model.kept = torch.ones(4)
        return h * model.kept
    return h * model.kept if model.kept.sum() > 3 else h


CACHES = [
    mask_of_a_size,
    table_of_a_buffer,
    by_size,
    in_an_object,
    on_the_class,
    cached_property,
    registered_later,
    grown_buffer,
    sliced_and_detached,
    in_private,
    beside_an_lstm,
    statistics_beside,
]
OTHERS = {
    of_the_input: "kept",
    of_a_parameter: "by_size",
    of_a_draw: "kept",
    of_a_written_buffer: "kept",
    counted_in_a_tensor: "kept",
    other_in_the_next_call: "kept",
    buffer_of_the_input: "later",
    grown_of_the_input: "longer",
    written_in_place: "kept",
    branches_on_values: "kept",
}


@pytest.fixture(autouse=True)
def _empty_caches() -> Iterator[None]:
    yield
    IN_GLOBALS.clear()
    Model.on_type = None


@pytest.mark.parametrize("middle", CACHES, ids=lambda f: f.__name__)
def test_caches_of_what_every_step_computes_alike(middle: Middle) -> None:
    assert_trains_alike(with_middle(Model, middle))


@pytest.mark.parametrize("middle", OTHERS, ids=lambda f: f.__name__)
def test_what_else_the_next_call_reads_is_refused(middle: Middle) -> None:
    name = OTHERS[middle]
    assert_refused(
        with_middle(Model, middle),
        f"forward changes what {name} holds, and its next call computes something else",
    )


class InGlobals(Linears):
    """Keeps what `make` gives of its input in a global of its file."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        if "table" not in IN_GLOBALS:
            IN_GLOBALS["table"] = self.make(x)
        return self.last(self.first(x) + IN_GLOBALS["table"]).square().mean()


def test_caches_in_globals() -> None:
    assert_refused(InGlobals(lambda x: x.mean(0)), r"test_next_call.IN_GLOBALS holds")
    assert not IN_GLOBALS
    # Of the model as it is, which runs beside it: in the same place.
    assert captured_line(InGlobals(lambda x: torch.arange(4).float())) == ""
    assert not IN_GLOBALS


class Attention(nn.Module):
    """With a table and a mask that are cached, and statistics in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.mask: Tensor | None = None
        self.table = Table()

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(8, 8).tril().bool()
        h = self.linear(self.norm(x)) * self.table.of(4)
        weights = (h @ h.T).masked_fill(~self.mask[: len(x), : len(x)], -1e9).softmax(-1)
        return x + weights @ h


class Deep(Linears):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Attention() for _ in range(4)))

    def middle(self, h: Tensor) -> Tensor:
        return self.layers(h)


def test_caches_of_equal_layers() -> None:
    assert_trains_alike(Deep())


class Counting(Linears):
    """Counts on its class: four in every call, read modulo three."""

    step = 0

    def middle(self, h: Tensor) -> Tensor:
        for _ in range(4):
            type(self).step += 1
            h = h * (1 + type(self).step % 3)
        return h


def test_the_second_call_of_a_trace_begins_where_the_first_one_began() -> None:
    """A third trace may find a counter where the first one did."""
    assert_refused(
        Counting(), r"forward changes .*Counting.step \(from 0 to 4\), and its next call"
    )
    assert Counting.step == 0


class CountingLayer(nn.Module):
    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        type(self).steps += 1
        out: Tensor = self.linear(x) * (1 + CountingLayer.steps % 2)
        return out


class Shared(Linears):
    """One linear has two names, for which an export has classes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CountingLayer() for _ in range(2))
        self.layers[1].linear = self.layers[0].linear

    def middle(self, h: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](h))


def test_what_modules_with_shared_parts_write_to_their_class_arrives() -> None:
    assert_trains_alike(Shared())
    CountingLayer.steps = 0


LASTING = ("constant", "buffer")
LEAVES = (*LASTING, "input", "parameter", "draw")


def leaf(kind: str, model: Any, h: Tensor) -> Tensor:
    made: dict[str, Callable[[], Tensor]] = {
        "constant": lambda: torch.arange(4).float(),
        "buffer": lambda: model.factor,
        "input": lambda: h.detach().mean(0),
        "parameter": lambda: model.first.bias.detach(),
        "draw": lambda: torch.rand(4),
    }
    return made[kind]()


@settings(max_examples=12)
@given(
    leaves=st.lists(st.sampled_from(LEAVES), min_size=1, max_size=3),
    place=st.sampled_from(("kept", "pair", "by_size", "table", "later")),
    part=st.sampled_from((None, 4)),
)
def test_a_cache_is_captured_where_every_step_computes_it_alike(
    leaves: list[str], place: str, part: int | None
) -> None:
    def middle(model: Any, h: Tensor) -> Tensor:
        found = read(model, place)
        if found is None:
            found = functools.reduce(torch.add, [leaf(kind, model, h).cos() for kind in leaves])
            write(model, place, found)
        return h + found[:part]

    line = captured_line(with_middle(Model, middle))
    assert (line == "") == set(leaves).issubset(LASTING), line


def read(model: Any, place: str) -> Any:
    if place == "by_size":
        return model.by_size.get("it")
    if place == "table":
        return model.table.values
    return model.pair and model.pair[0] if place == "pair" else getattr(model, place)


def write(model: Any, place: str, value: Tensor) -> None:
    if place == "by_size":
        model.by_size["it"] = value
    elif place == "table":
        model.table.values = value
    elif place == "pair":
        model.pair = (value, value)
    else:
        setattr(model, place, value)
