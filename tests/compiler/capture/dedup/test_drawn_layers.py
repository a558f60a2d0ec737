"""Models of equal layers that keep, share and write things in ways drawn at random: a compiled copy
trains as the model does, or the model is refused in plain words."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshfold
from meshfold.errors import CaptureError

WIDTH = 4
STEPS = 3
COUNTS: list[int] = []


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.linear(self.norm(x)) * scale


class Call:
    """What all layers of one call share."""

    def __init__(self, x: Tensor) -> None:
        self.sums = torch.zeros(WIDTH, dtype=x.dtype)
        self.seen: list[Tensor] = []


class Layer(nn.Module):
    steps = 0

    def __init__(self, number: int, habits: list[str]) -> None:
        super().__init__()
        self.number, self.habits = number, habits
        self.first, self.last = Part(), Part()
        self.gate = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.before: list[Layer] = []
        self.kept: Tensor | None = None
        self.input: Tensor | None = None
        self.tables: dict[int, Tensor] = {}

    def forward(self, x: Tensor, call: Call) -> Tensor:
        residual = x
        for habit in self.habits:
            x = HABITS[habit](self, x, call)
        return residual + self.last(self.first(x))


def averages(layer: Any, x: Tensor, call: Call) -> Tensor:
    with torch.no_grad():
        layer.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
    return x - layer.mean


def assigns(layer: Any, x: Tensor, call: Call) -> Tensor:
    layer.mean = layer.mean * 0.9 + 0.1 * x.detach().mean(0)
    return x - layer.mean


def counts_calls(layer: Any, x: Tensor, call: Call) -> Tensor:
    layer.calls += 1
    return x * (1 + layer.calls.to(x.dtype) * 0.1)


def counts_on_the_class(layer: Any, x: Tensor, call: Call) -> Tensor:
    type(layer).steps += 1
    return x * x.new_tensor(1.0 + type(layer).steps % 3)


def counts_in_a_global(layer: Any, x: Tensor, call: Call) -> Tensor:
    COUNTS.append(layer.number)
    return x + len(COUNTS) % 2


def keeps_a_table(layer: Any, x: Tensor, call: Call) -> Tensor:
    if len(x) not in layer.tables:
        layer.tables[len(x)] = torch.linspace(0, 1, WIDTH, dtype=x.dtype)
    return x * layer.tables[len(x)]


def keeps_its_input(layer: Any, x: Tensor, call: Call) -> Tensor:
    layer.input = x.detach()
    return x if not layer.before or layer.before[0].input is None else x + layer.before[0].input


def keeps_what_it_saw_first(layer: Any, x: Tensor, call: Call) -> Tensor:
    if layer.kept is None:
        layer.kept = x.detach().mean()
    return x * layer.kept


def takes_turns(layer: Any, x: Tensor, call: Call) -> Tensor:
    layer.first, layer.last = layer.last, layer.first
    return x


def without_gradients(layer: Any, x: Tensor, call: Call) -> Tensor:
    with torch.no_grad():
        y = layer.first(x)
    return x + y


def every_other_without(layer: Any, x: Tensor, call: Call) -> Tensor:
    with torch.set_grad_enabled(layer.number % 2 == 0):
        y = layer.last(x)
    return x + y


def writes_in_views(layer: Any, x: Tensor, call: Call) -> Tensor:
    x = x * 1
    x.view(2, -1, WIDTH)[0].mul_(0.5)
    x[:, ::2] += layer.gate[::2]
    return x


def writes_its_input(layer: Any, x: Tensor, call: Call) -> Tensor:
    return x.add_(layer.gate)


def mends_what_is_small(layer: Any, x: Tensor, call: Call) -> Tensor:
    x = x.clone()
    x[x < 0] *= 0.1
    return x


def own_weights(layer: Any, x: Tensor, call: Call) -> Tensor:
    weight = layer.first.linear.weight.clone()
    weight[0] = 0
    return x + F.linear(x, weight) + F.linear(x, layer.last.linear.weight.data)


def functional(layer: Any, x: Tensor, call: Call) -> Tensor:
    halves = {name: p * 0.5 for name, p in layer.first.named_parameters()}
    return x + torch.func.functional_call(layer.first, halves, (x,))


def gradient_of_a_part(layer: Any, x: Tensor, call: Call) -> Tensor:
    (found,) = torch.autograd.grad(layer.first(x).sum(), x, create_graph=True)
    return x + found


def sums_up(layer: Any, x: Tensor, call: Call) -> Tensor:
    call.sums = call.sums + x.mean(0)
    return x + call.sums


def sums_in_place(layer: Any, x: Tensor, call: Call) -> Tensor:
    call.sums.add_(x.mean(0))
    return x * call.sums.sigmoid()


def looks_back(layer: Any, x: Tensor, call: Call) -> Tensor:
    call.seen.append(x)
    return x + sum(call.seen[-2:])


def of_its_number(layer: Any, x: Tensor, call: Call) -> Tensor:
    return layer.last(x, scale=0.5 + (layer.number == 0))


def of_the_one_before(layer: Any, x: Tensor, call: Call) -> Tensor:
    return x * layer.before[0].gate if layer.before else x


def checkpointed(layer: Any, x: Tensor, call: Call) -> Tensor:
    out: Tensor = torch.utils.checkpoint.checkpoint(layer.first, x, use_reentrant=False)
    return out


OF_A_CALL = (
    averages, assigns, counts_calls, keeps_a_table, without_gradients, every_other_without,
    writes_in_views, writes_its_input, mends_what_is_small, own_weights, functional,
    gradient_of_a_part, sums_up, sums_in_place, looks_back, of_its_number, of_the_one_before,
    checkpointed,
)  # fmt: skip
OF_SEVERAL_CALLS = (
    counts_on_the_class, counts_in_a_global, keeps_its_input, keeps_what_it_saw_first, takes_turns,
)  # fmt: skip
HABITS: dict[str, Callable[[Any, Tensor, Call], Tensor]] = {
    f.__name__: f for f in (*OF_A_CALL, *OF_SEVERAL_CALLS)
}
OF_ALL_CALLS = {f.__name__ for f in OF_SEVERAL_CALLS}
"""With which the next call may compute something else, by the number and order of layers."""


class Stack(nn.Module):
    """order: in which its layers are called, some twice."""

    def __init__(self, habits: list[str], order: list[int], shares: bool, frozen: bool) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(k, habits) for k in range(max(order) + 1))
        for before, layer in zip(self.layers, self.layers[1:], strict=False):
            layer.before = [before]
        self.order = order
        if shares:
            self.layers[2].last = self.layers[0].first
        self.layers[1].requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        h, call = self.inp(x), Call(x)
        for k in self.order:
            h = self.layers[k](h, call)
        return self.out(h).square().mean()


def forget() -> None:
    Layer.steps = 0
    COUNTS.clear()


def steps_of(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """The losses of some steps, then parameters and buffers in the order of their names."""
    forget()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(x=batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return [*losses, *(held[name].detach() for name in sorted(held))]


def assert_trains_alike_or_is_refused(seed: int) -> None:
    draw = random.Random(seed)
    habits = draw.sample(list(HABITS), draw.randint(1, 3))
    order = [*range(draw.choice((3, 4))), *draw.choice(([], [1, 2]))][:: draw.choice((1, -1))]
    shares, frozen = draw.random() < 0.2, draw.random() < 0.2

    def build() -> Stack:
        forget()
        torch.manual_seed(seed)
        return Stack(habits, order, shares, frozen).double()

    torch.manual_seed(seed + 1)
    batches = [torch.randn(8, WIDTH, dtype=torch.float64) for _ in range(STEPS)]
    wanted = steps_of(build(), batches)
    try:
        compiled = meshfold.compile(build(), "local-cpux1", {"x": batches[0]})
    except CaptureError as error:
        assert "its next call computes something else" in str(error), (habits, error)
        assert OF_ALL_CALLS & set(habits), (habits, order)
        return
    for found, of in zip(steps_of(compiled, batches), wanted, strict=True):
        torch.testing.assert_close(found, of, rtol=1e-9, atol=1e-12, msg=f"{habits} {order}")


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    forget()


@pytest.mark.parametrize(
    "seed", [*range(10), *(pytest.param(k, marks=pytest.mark.slow) for k in range(10, 60))]
)
def test_drawn_layers(seed: int) -> None:
    assert_trains_alike_or_is_refused(seed)
