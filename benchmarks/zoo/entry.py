"""What every model of the zoo is: a library, a name, and what builds the model and its batch."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

BATCH, CLASSES = 4, 8

Built = tuple[nn.Module, dict[str, Any]]


@dataclass(frozen=True)
class Entry:
    """build: gives (model, keyword arguments of one call), and imports its library then."""

    library: str
    name: str
    build: Callable[[], Built]


def of(library: str, name: str, module: str, build: Callable[[Any], Built]) -> Entry:
    """build: of the imported module."""
    return Entry(library, name, lambda: build(importlib.import_module(module)))


def make(entry: Entry) -> Built:
    """The float64 model and its batch, the same in every process. Parameters get noise: initial
    values leave biases 0 and norms 1, which would hide a wrong gradient."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, batch = entry.build()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point() and parameter.requires_grad:
                    parameter.add_(0.05 * torch.randn_like(parameter))
        return model, batch


class Classified(nn.Module):
    """A model with the cross entropy of its logits, whose classes are the last dim of `dim`."""

    def __init__(self, model: nn.Module, dim: int = 1) -> None:
        super().__init__()
        self.model, self.dim = model, dim

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = first(self.model(x))
        return functional.cross_entropy(logits.movedim(self.dim, 1), labels)


class Fitted(nn.Module):
    """A model with the mean square of its output against a target."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, target: Tensor, **inputs: Any) -> Tensor:
        return functional.mse_loss(first(self.model(**inputs)), target)


class Fitting(nn.Module):
    """The same for a model of positional arguments."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(first(self.model(x)), target)


def first(output: Any) -> Tensor:
    """The tensor that a model is about: itself, `sample`, or the first of a tuple or list."""
    while not isinstance(output, Tensor):
        if isinstance(output, dict) and "out" in output:
            output = output["out"]
        else:
            output = output.sample if hasattr(output, "sample") else output[0]
    return output


def images(model: nn.Module, pixels: int = 32, channels: int = 3) -> Built:
    """An image classifier and its batch; in train mode."""
    x = torch.randn(BATCH, channels, pixels, pixels)
    return Classified(model.train()), {"x": x, "labels": torch.randint(0, CLASSES, (BATCH,))}


def segments(
    model: nn.Module, pixels: int = 32, channels: int = 3, classes: int = CLASSES
) -> Built:
    """A model that gives each pixel a class."""
    x = torch.randn(BATCH, channels, pixels, pixels)
    labels = torch.randint(0, classes, (BATCH, pixels, pixels))
    return Classified(model.train()), {"x": x, "labels": labels}


def fits(model: nn.Module, x: Tensor, *shape: int) -> Built:
    """A model of one argument, against noise of a shape."""
    return Fitting(model.train()), {"x": x, "target": torch.randn(shape)}


def fits_named(model: nn.Module, shape: tuple[int, ...], **inputs: Any) -> Built:
    """A model of named arguments, against noise of a shape."""
    return Fitted(model.train()), {**inputs, "target": torch.randn(shape)}


def tokens(model: nn.Module, vocabulary: int = 64, length: int = 8) -> Built:
    """A language model whose logits have the vocabulary last."""
    x = torch.randint(0, vocabulary, (BATCH, length))
    labels = torch.randint(0, vocabulary, (BATCH, length))
    labels[0, : length // 2] = -100  # a wrong mean over ranks shows
    return Classified(model.train(), dim=-1), {"x": x, "labels": labels}
