"""Stacks of small layers that do what layers should not: state, places, ties, odd ones out."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

DEPTH = 4
X = {"x": torch.randn(2, 4, generator=torch.Generator().manual_seed(0))}


class Layer(nn.Module):
    """A layer that is large enough to be worth a class."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 8)
        self.act = nn.GELU()
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, *extra: Any) -> Any:
        return x + self.down(self.act(self.up(self.norm(x))))


class Stack(nn.Module):
    """A first module, so that every layer gets a value with a gradient, then layers."""

    def __init__(self, make: Callable[[int], nn.Module] = Layer, depth: int = DEPTH) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.layers = nn.ModuleList(make(k) for k in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).sum()


class EveryThird(Layer):
    def forward(self, x: torch.Tensor, *extra: Any) -> Any:
        return super().forward(x) if self.index % 3 else super().forward(x.sin())


class Divided(Layer):
    def forward(self, x: torch.Tensor, *extra: Any) -> Any:
        return super().forward(x / (self.index + 1))


class Counting(Layer):
    calls = 0

    def forward(self, x: torch.Tensor, *extra: Any) -> Any:
        self.calls += 1
        return super().forward(x * self.calls)


class CountingOnType(Layer):
    calls = 0

    def forward(self, x: torch.Tensor, *extra: Any) -> Any:
        type(self).calls += 1
        return super().forward(x * type(self).calls)


GLOBAL_CALLS = 0
GLOBAL_STATE = {"calls": 0}


class CountingGlobally(Layer):
    def forward(self, x: torch.Tensor, *extra: Any) -> Any:
        global GLOBAL_CALLS
        GLOBAL_CALLS += 1
        return super().forward(x * GLOBAL_CALLS)


class CountingInDict(Layer):
    def forward(self, x: torch.Tensor, *extra: Any) -> Any:
        GLOBAL_STATE["calls"] += 1
        return super().forward(x * GLOBAL_STATE["calls"])


class Config:
    calls = 0


class CountingInConfig(Layer):
    config = Config()

    def __init__(self, index: int, config: Config) -> None:
        super().__init__(index)
        self.config = config

    def forward(self, x: torch.Tensor, *extra: Any) -> Any:
        self.config.calls += 1
        return super().forward(x * self.config.calls)


class InPlace(Layer):
    def forward(self, x: torch.Tensor, *extra: Any) -> Any:
        y = super().forward(x)
        x.mul_(2)
        return y


class Buffered(Layer):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor, *extra: Any) -> Any:
        self.steps += 1
        return super().forward(x) * self.steps


class ReadsDict(Layer):
    def forward(self, x: torch.Tensor, *extra: Any) -> Any:
        return super().forward(x * vars(self)["index"])


class HasExtra(Layer):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        if index == 2:
            self.scale = 3.0

    def forward(self, x: torch.Tensor, *extra: Any) -> Any:
        return super().forward(x * getattr(self, "scale", 1.0))


class Returning(Layer):
    """Returns its argument, a constant and two results."""

    def forward(self, x: torch.Tensor, *extra: Any) -> Any:
        y = super().forward(x)
        return {"y": y, "x": x, "none": None, "pair": (y.sin(), 3)}


class NoGrad(Layer):
    def forward(self, x: torch.Tensor, *extra: Any) -> Any:
        with torch.no_grad():
            scale = x.exp()
        return super().forward(x) * scale


class UNet(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        skips = []
        for layer in self.layers[: DEPTH // 2]:
            x = layer(x)
            skips.append(x)
        for layer in self.layers[DEPTH // 2 :]:
            x = layer(x + skips.pop())
        return x.sum()


class ScaledByParent(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for k, layer in enumerate(self.layers):
            x = layer(x) * (k + 1.5)
        return x.sum()


class IndexedByParent(Stack):
    """The parent tells each layer its place just before the call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for k, layer in enumerate(self.layers):
            layer.index = k % 2
            x = layer(x)
        return x.sum()


class ConstantsByParent(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for k, layer in enumerate(self.layers):
            x = layer(x, k // 3)
        return x.sum()


class MaskByParent(Stack):
    """A value reaches the layers by an attribute, not by an argument."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        mask = x.sin()
        for layer in self.layers:
            layer.mask = mask
            x = layer(x)
        return x.sum()


class MaskReader(Layer):
    mask: Any = None

    def forward(self, x: torch.Tensor, *extra: Any) -> Any:
        return super().forward(x) * self.mask


class UsesDict(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        total = x.sum()
        for layer in self.layers:
            out = layer(x)
            total = total + out["pair"][0].sum() * out["pair"][1] + out["x"].sum()
            x = out["y"]
        return total


class Twice(Stack):
    """Every layer is called twice: its parameters are shared by two instances."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in [*self.layers, *self.layers]:
            x = layer(x)
        return x.sum()


class Frozen(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        with torch.no_grad():
            for layer in self.layers:
                x = layer(x)
        return (x * self.layers[0].up.weight.sum()).sum()


def counting_in_one_config() -> Stack:
    config = Config()
    return Stack(lambda k: CountingInConfig(k, config))


def tied() -> Stack:
    """Layers share the weight of one submodule with a table outside."""
    model = Stack()
    model.table = nn.Linear(4, 8)
    for layer in model.layers:
        layer.up.weight = model.table.weight
    return model


def partly_tied() -> Stack:
    model = Stack(depth=8)
    model.layers[2].up.weight = model.layers[5].up.weight
    return model


def nested() -> Stack:
    return Stack(lambda k: nn.Sequential(Layer(0), Layer(1), Layer(2), Layer(3)))


def odd(change: Callable[[Layer], None], at: int = 3) -> Stack:
    model = Stack(depth=8)
    change(model.layers[at])
    return model


def wider(layer: Layer) -> None:
    layer.up, layer.down = nn.Linear(4, 16), nn.Linear(16, 4)


def other_activation(layer: Layer) -> None:
    layer.act = nn.ReLU()


def other_epsilon(layer: Layer) -> None:
    layer.norm.eps = 1e-3


def frozen_weight(layer: Layer) -> None:
    layer.up.weight.requires_grad_(False)


def no_bias(layer: Layer) -> None:
    layer.up.bias = None


def hooked(layer: Layer) -> None:
    layer.down.register_forward_hook(lambda module, args, output: output * 2)


# name -> (model, whether equal layers are expected to be call nodes)
CASES: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "plain": (Stack, True),
    "every third": (lambda: Stack(EveryThird, 9), False),
    "divided by place": (lambda: Stack(Divided), False),
    "counter on self": (lambda: Stack(Counting), False),
    "counter on type": (lambda: Stack(CountingOnType), False),
    "counter in global": (lambda: Stack(CountingGlobally), False),
    "counter in global dict": (lambda: Stack(CountingInDict), False),
    "counter in shared config": (counting_in_one_config, False),
    "in place on argument": (lambda: Stack(InPlace), False),
    "buffer update": (lambda: Stack(Buffered), False),
    "reads its dict": (lambda: Stack(ReadsDict), False),
    "attribute on one": (lambda: Stack(HasExtra), True),
    "no_grad inside": (lambda: Stack(NoGrad), True),
    "u-net": (UNet, True),
    "scaled by parent": (ScaledByParent, True),
    "place set by parent": (lambda: IndexedByParent(EveryThird, 6), True),
    "constant by parent": (ConstantsByParent, True),
    "value by attribute": (lambda: MaskByParent(MaskReader), False),
    "structured results": (lambda: UsesDict(Returning), True),
    "called twice": (Twice, True),
    "under no_grad": (Frozen, True),
    "tied to outside": (tied, True),
    "two layers tied": (partly_tied, True),
    "nested": (nested, True),
    "wider": (lambda: odd(wider), True),
    "activation": (lambda: odd(other_activation), True),
    "epsilon": (lambda: odd(other_epsilon), True),
    "frozen weight": (lambda: odd(frozen_weight), True),
    "no bias": (lambda: odd(no_bias), True),
    "hook": (lambda: odd(hooked), True),
    "odd first": (lambda: odd(wider, 0), True),
    "odd last": (lambda: odd(wider, 7), True),
}


def reset_counters() -> None:
    global GLOBAL_CALLS
    GLOBAL_CALLS = GLOBAL_STATE["calls"] = CountingOnType.calls = 0
