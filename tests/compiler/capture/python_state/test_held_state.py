"""Python of a model that a graph of one call cannot hold: refused, where it matters."""

from itertools import count

import pytest
import torch
from support.programs.linears import Linears, Middle, assert_refused, captured_line
from torch import Tensor, nn

from meshfold.capture.pipeline import capture
from meshfold.capture.python_state.held_state import changed_state, plain_state
from meshfold.errors import CaptureError

COUNTS = {"calls": 0}


class Settings:
    """An object of the user."""

    def __init__(self) -> None:
        self.calls = 0


class Model(Linears):
    """Keeps state of many kinds."""

    total = 0

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.scale, self.log = 0, 1.0, []
        self.settings, self.cache, self.numbers = Settings(), {}, count(1)
        number = 0

        def next_number() -> int:
            nonlocal number
            number += 1
            return number

        self.next_number = next_number


class Scale(nn.Module):
    """A factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Layer(nn.Module):
    """A linear layer that counts its calls."""

    def __init__(self, is_used: bool) -> None:
        super().__init__()
        self.linear, self.calls, self.is_used = nn.Linear(4, 4), 0, is_used

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) * (self.calls if self.is_used else 1)


class Layers(Model):
    """Four equal layers in between."""

    def __init__(self, is_used: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(is_used) for _ in range(4)])

    def middle(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h)
        return h


def counted(model: Model, h: Tensor) -> Tensor:
    model.calls += 1
    return h * model.calls


def warmed(model: Model, h: Tensor) -> Tensor:
    model.scale *= 0.5
    return h * model.scale


def logged(model: Model, h: Tensor) -> Tensor:
    model.log.append(1)
    return h * len(model.log)


def counted_globally(model: Model, h: Tensor) -> Tensor:
    COUNTS["calls"] += 1
    return h * COUNTS["calls"]


def counted_on_type(model: Model, h: Tensor) -> Tensor:
    Model.total += 1
    return h * Model.total


def counted_in_object(model: Model, h: Tensor) -> Tensor:
    model.settings.calls += 1
    return h * model.settings.calls


def counted_anew(model: Model, h: Tensor) -> Tensor:
    model.fresh = getattr(model, "fresh", 0) + 1
    return h * model.fresh


def kept_for_the_next(model: Model, h: Tensor) -> Tensor:
    before = getattr(model, "kept", None)
    model.kept = h.detach()
    return h if before is None else h + before


def kept_to_look_at(model: Model, h: Tensor) -> Tensor:
    model.kept, model.all_kept = h.detach(), [h.detach()]
    return h


def cached(model: Model, h: Tensor) -> Tensor:
    if "mean" not in model.cache:
        model.cache["mean"] = h.detach().mean(0)
    return h + model.cache["mean"]


def counted_in_closure(model: Model, h: Tensor) -> Tensor:
    return h * model.next_number()


def counted_on_function(model: Model, h: Tensor) -> Tensor:
    counted_on_function.calls = getattr(counted_on_function, "calls", 0) + 1
    return h * counted_on_function.calls


def counted_by_iterator(model: Model, h: Tensor) -> Tensor:
    return h * next(model.numbers)


def set_alike(model: Model, h: Tensor) -> Tensor:
    model.width = h.shape[-1]
    return h * model.width


def only_counted(model: Model, h: Tensor) -> Tensor:
    model.calls += 1
    return h


def module_made_once(model: Model, h: Tensor) -> Tensor:
    if not hasattr(model, "scaling"):
        model.scaling = Scale(2.0)
    return model.scaling(h)


def module_made_anew(model: Model, h: Tensor) -> Tensor:
    model.scaling = Scale(2 * model.scaling.factor if hasattr(model, "scaling") else 2.0)
    return model.scaling(h)


MIDDLES = {
    counted: r"forward changes calls \(from 0 to 1\), and its next call computes something else",
    warmed: r"forward changes scale \(from 1.0 to 0.5\)",
    logged: r"forward changes log \(from \[\] to \[1\]\)",
    counted_globally: "forward changes what .*test_held_state.COUNTS.calls holds",
    counted_on_type: r"test_held_state:Model.total \(from 0 to 1\)",
    counted_in_object: r"forward changes settings.calls \(from 0 to 1\)",
    counted_anew: r"forward changes fresh \(from None to 1\)",
    kept_for_the_next: "forward changes what kept holds, and its next call computes something els",
    kept_to_look_at: "",
    cached: "forward changes what cache holds, .* register it as a buffer",
    counted_in_closure: "forward changes what next_number.0 holds",
    counted_on_function: "forward changes what .*calls holds",
    counted_by_iterator: "forward changes what numbers holds",
    set_alike: "",
    only_counted: "",
    module_made_once: "",
    module_made_anew: r"forward changes scaling.training \(from None to True\)",
}


@pytest.mark.parametrize("middle", MIDDLES, ids=lambda f: f.__name__)
def test_what_forward_does_is_held_or_refused(middle: Middle) -> None:
    class Given(Model):
        def middle(self, h: Tensor) -> Tensor:
            return middle(self, h)

    COUNTS["calls"] = Model.total = 0
    assert_refused(Given(), MIDDLES[middle])


@pytest.mark.parametrize("is_used", [True, False])
def test_layers_that_count(is_used: bool) -> None:
    line = captured_line(Layers(is_used))
    assert ("forward changes layers.0.calls (from 0 to 1)" in line) == is_used


def test_plain_state_is_of_plain_values() -> None:
    model = Model()
    before = plain_state(model)
    assert before["", "calls"] == 0 and ("", "first") not in before
    model.calls, model.log = 3, [torch.ones(1)]
    assert changed_state(before, model) == {("", "calls"): (0, 3)}


class Grid(nn.Module):
    """Keeps a table of positions for the sizes, dtype and device that it was last asked for, as
    neural operators do. by: how it writes down for which."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.linear, self.by = nn.Linear(4, 4), by
        self.table: list[Tensor] | None = None
        self.made_for: object = None

    def forward(self, x: Tensor) -> Tensor:
        key = {
            "size": x.shape[1:],
            "tuple": tuple(x.shape[1:]),
            "dtype": x.dtype,
            "device": x.device,
            "all": (x.shape[1:], x.dtype, x.device),
        }[self.by]
        if self.table is None or self.made_for != key:
            self.table, self.made_for = [torch.linspace(0, 1, x.shape[1])], key
        return (self.linear(x) + self.table[0]).square().mean()


@pytest.mark.parametrize("by", ["size", "tuple", "dtype", "device", "all"])
def test_a_cache_is_found_again_by_sizes_dtype_and_device(by: str) -> None:
    captured = capture(Grid(by), {"x": torch.randn(8, 4)})
    assert captured.graph.num_ops == 5


class Shifting(nn.Module):
    """Computes something else with a tuple that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.window = nn.Linear(4, 4), (0, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.window = (self.window[1], self.window[0])
        return self.linear(x).roll(self.window[0]).mean()


def test_a_tuple_that_changes_what_is_computed_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"forward changes window \(from \(0, 1\) to \(1, 0\)\)"):
        capture(Shifting(), {"x": torch.randn(8, 4)})
