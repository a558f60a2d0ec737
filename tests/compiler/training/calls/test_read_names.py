"""Attributes that code may read."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.training.calls.read_names import ReadNames


@dataclass
class Config:
    scale: float = 1.0
    shift: float = 0.0
    unread: float = 0.0

    def both(self) -> float:
        return self.scale + self.shift

    def forget(self) -> None:
        self.cached = 1


def decorated(function: Any) -> Any:
    @functools.wraps(function)
    def inner(self: Any, x: Tensor) -> Any:
        return function(self, x) * self.in_wrapper

    return inner


def helper(module: Any, x: Tensor) -> Tensor:
    module.counted = 1
    return x * module.in_helper


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.config = nn.Dropout(0.5), Config()
        for name in ("a", "in_property", "by_text", "in_helper", "in_wrapper", "in_lambda"):
            setattr(self, name, 1.0)
        self.counted = self.own = self.elsewhere = self.in_training = 0

    @property
    def half(self) -> float:
        return self.in_property / 2

    def part(self, x: Tensor) -> Tensor:
        self.own += 1
        return x * self.a * self.own

    @decorated
    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.part(x)) * self.half * getattr(self, "by_text")  # noqa: B009
        return helper(self, (lambda y: y * self.in_lambda)(x)) * self.config.both()

    def training_step(self, x: Tensor) -> None:
        self.in_training += 1
        self.elsewhere = self.in_training + self.in_training


def test_what_forward_may_read() -> None:
    net = Net()
    reads = ReadNames.of(net)
    read = {name for name in vars(net) if reads.may_read(net, name)} - set(vars(nn.Module()))
    assert read == {"a", "in_property", "by_text", "in_helper", "in_wrapper", "in_lambda", "config"}
    assert reads.may_read(net.dropout, "p") and not reads.may_read(net.dropout, "unheard")
    inside = {name for name in vars(net.config) if reads.may_read(net.config, name)}
    assert inside == {"scale", "shift"} and not reads.may_read(net.config, "cached")


def test_what_hooks_and_a_forward_of_an_object_read() -> None:
    net = nn.Linear(2, 2)
    net.factor, net.of_hook = 2.0, 3.0  # type: ignore[assignment]
    net.forward = lambda x: x * net.factor  # type: ignore[assignment, method-assign]
    net.register_forward_hook(lambda module, args, result: result * module.of_hook)
    reads = ReadNames.of(net)
    assert reads.may_read(net, "factor") and reads.may_read(net, "of_hook")


def test_every_class_of_torch_can_be_read() -> None:
    layer = nn.TransformerEncoderLayer(8, 2)
    reads = ReadNames.of(layer)
    assert reads.may_read(layer.norm1, "eps") and reads.may_read(layer, "norm_first")
    assert not reads.may_read(layer.norm1, "elementwise_affinely") and torch is not None
