"""Python of a model that a graph of one call cannot hold: refused, where it matters."""

import re
from itertools import count

import pytest
import torch
from support.programs.local_programs import emit_uniform, errors_of_a_step
from torch import Tensor, nn

import meshfold
from meshfold.capture.pipeline import capture
from meshfold.capture.trace.python_state import changed_state, plain_state
from meshfold.errors import CaptureError
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.strategy import UniformStrategy
from meshfold.validation.float64_mode import float64_everywhere

COUNTS = {"calls": 0}


class Settings:
    """An object of the user."""

    def __init__(self) -> None:
        self.calls = 0


class Model(nn.Module):
    """Two linear layers, with something in between."""

    total = 0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.calls, self.scale, self.log = 0, 1.0, []
        self.settings, self.cache, self.numbers = Settings(), {}, count(1)
        number = 0

        def next_number() -> int:
            nonlocal number
            number += 1
            return number

        self.next_number = next_number

    def middle(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x))).square().mean()


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


def seeded(model: Model, h: Tensor) -> Tensor:
    torch.manual_seed(0)
    return h + torch.rand_like(h)


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


def hooked(model: Model, h: Tensor) -> Tensor:
    h.register_hook(lambda g: 2 * g)
    return h


def backward_inside(model: Model, h: Tensor) -> Tensor:
    h.sum().backward(retain_graph=True)
    return h


def backward_by_function(model: Model, h: Tensor) -> Tensor:
    torch.autograd.backward([model.first.weight.sum()])
    return h


def backward_to_a_leaf(model: Model, h: Tensor) -> Tensor:
    leaf = h.detach().requires_grad_()
    torch.autograd.backward([leaf.square().sum()])
    return h + leaf.grad


def gradient_set(model: Model, h: Tensor) -> Tensor:
    model.first.weight.grad = torch.ones_like(model.first.weight)
    return h


def gradients_cleared(model: Model, h: Tensor) -> Tensor:
    model.zero_grad()
    return h


def data_read_for_a_norm(model: Model, h: Tensor) -> Tensor:
    return h / h.data.norm() + model.first.weight.data.sum()


def data_written_to(model: Model, h: Tensor) -> Tensor:
    h.data.mul_(2)
    return h


def read_data_written_to(model: Model, h: Tensor) -> Tensor:
    copied = h.clone()
    data = copied.data
    copied.add_(1)
    return h + data


def data_written(model: Model, h: Tensor) -> Tensor:
    model.first.weight.data = model.first.weight * 0.5
    return h


def gradient_inside(model: Model, h: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(h.square().sum(), h, create_graph=True)
    return h + gradient


def gradient_retained(model: Model, h: Tensor) -> Tensor:
    h.retain_grad()
    return h


MIDDLES = {
    counted: r"forward changes calls \(from 0 to 1\), and its next call computes something else",
    warmed: r"forward changes scale \(from 1.0 to 0.5\)",
    logged: r"forward changes log \(from \[\] to \[1\]\)",
    counted_globally: r"test_python_state.py:COUNTS \(from \{'calls': 0\} to \{'calls': 1\}\)",
    counted_on_type: r"test_python_state:Model.total \(from 0 to 1\)",
    counted_in_object: r"forward changes settings.calls \(from 0 to 1\)",
    counted_anew: r"forward changes fresh \(from None to 1\)",
    kept_for_the_next: "forward changes what kept holds, and its next call computes something els",
    kept_to_look_at: "",
    cached: "forward changes what cache holds, .* register it as a buffer",
    counted_in_closure: "forward changes what next_number.0 holds",
    counted_on_function: "forward changes what .*calls holds",
    counted_by_iterator: "forward changes what numbers holds",
    seeded: "forward seeds torch's random numbers, which would be lost in a graph",
    set_alike: "",
    only_counted: "",
    module_made_once: "",
    module_made_anew: r"forward changes scaling.training \(from None to True\)",
    hooked: "Tensor.register_hook inside of forward is lost in a graph; .*test_python_state.py",
    backward_inside: "Tensor.backward inside of forward is lost in a graph",
    backward_by_function: "forward writes to .grad of first.weight, by torch.autograd.backward",
    backward_to_a_leaf: "forward writes to .grad of a tensor, by torch.autograd.backward",
    gradient_set: "forward writes to .grad of first.weight, by .* or itself",
    gradients_cleared: "",
    data_read_for_a_norm: "",
    data_written_to: "a write to the memory of Tensor.data inside of forward is lost in a graph",
    read_data_written_to: "a write to the memory of Tensor.data .*test_python_state.py",
    data_written: "Tensor.data = inside of forward is lost in a graph; compute a new tensor",
    gradient_inside: "",
    gradient_retained: "",
}


def captured_line(model: nn.Module) -> str:
    """The line that refuses a model; empty where it is captured."""
    COUNTS["calls"] = Model.total = 0
    try:
        capture(model, {"x": torch.randn(8, 4)})
    except CaptureError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("middle", MIDDLES, ids=lambda f: f.__name__)
def test_what_forward_does_is_held_or_refused(middle) -> None:
    class Given(Model):
        def middle(self, h: Tensor) -> Tensor:
            return middle(self, h)

    line = captured_line(Given())
    if MIDDLES[middle]:
        assert re.search(MIDDLES[middle], line) and "\n" not in line, line
    else:
        assert line == ""


@pytest.mark.parametrize("is_used", [True, False])
def test_layers_that_count(is_used: bool) -> None:
    line = captured_line(Layers(is_used))
    assert ("forward changes layers.0.calls (from 0 to 1)" in line) == is_used


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_are_refused_by_name(register: str) -> None:
    model = Model()
    getattr(model.first.weight, register)(lambda x: None)
    assert captured_line(model).startswith("first.weight has hooks of its gradient")


def test_plain_state_is_of_plain_values() -> None:
    model = Model()
    before = plain_state(model)
    assert before["", "calls"] == 0 and ("", "first") not in before
    model.calls, model.log = 3, [torch.ones(1)]
    assert changed_state(before, model) == {("", "calls"): (0, 3)}


def test_data_is_a_tensor_without_a_gradient() -> None:
    class Given(Model):
        def middle(self, h: Tensor) -> Tensor:
            return data_read_for_a_norm(self, h)

    torch.manual_seed(0)
    model, batch = Given().double(), {"x": torch.randn(8, 4, dtype=torch.float64)}
    with float64_everywhere():
        captured = capture(model, batch)
    program = emit_uniform(captured, UniformStrategy(dp=2), 8)
    for errors in errors_of_a_step(model, batch, captured, program):
        assert max(errors.values()) < 1e-12


class Averaged(nn.Module):
    """Keeps a running mean in a buffer, and another in turn with it."""

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.replaces = replaces
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("other", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        mean, other = 0.9 * self.mean + 0.1 * x.mean(0), self.mean.clone()
        if self.replaces:
            self.mean, self.other = mean, self.mean
        else:
            self.mean.copy_(mean)
            self.other.copy_(other)
        return (self.linear(x) - mean + self.other).square().mean()


class ManyAveraged(nn.Module):
    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Averaged(replaces) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return sum(layer(x) for layer in self.layers)


def num_writes(graph: FoldedGraph) -> int:
    return sum(len(graph.regions[i.region].graph.mutations) for i in graph.instances)


@pytest.mark.parametrize("model", [Averaged, ManyAveraged])
def test_a_buffer_that_forward_replaces_is_written(model: type[nn.Module]) -> None:
    replaced, written = (capture(model(r), {"x": torch.randn(8, 4)}).graph for r in (True, False))
    assert num_writes(replaced) == num_writes(written) > 0


class Swapped(nn.Module):
    """Two buffers that take each other's place, as views."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 4)
        self.register_buffer("one", torch.full((4,), 1.0))
        self.register_buffer("two", torch.full((4,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        self.one, self.two = self.two.view(-1), self.one.view(-1)
        return (self.last(x) + self.one).square().mean()


def test_buffers_that_change_places_as_views_keep_their_numbers() -> None:
    compiled = meshfold.compile(Swapped(), "local-cpux1", {"x": torch.randn(8, 4)})
    for step in range(3):
        compiled.train_step({"x": torch.randn(8, 4)})
        found = [compiled.one[0].item(), compiled.two[0].item()]
        assert found == ([2.0, 1.0] if step % 2 == 0 else [1.0, 2.0])
