"""Models of Hugging Face, alone or inside a module of the user's (a loss, a trainer's wrapper), and
what of their configurations a program chooses."""

from collections.abc import Iterator
from typing import Any

from torch import nn


def hugging_face_models(model: nn.Module) -> Iterator[Any]:
    """The outermost models of Hugging Face in `model`, itself included: their configurations hold
    those of the models within them."""
    if hasattr(model, "_can_set_experts_implementation") and hasattr(model, "config"):
        yield model
        return
    for child in model.children():
        yield from hugging_face_models(child)


def run_experts_as(model: nn.Module, implementation: str) -> tuple[str, ...]:
    """Sets how experts run wherever that can be set, and gives what was chosen before where it is
    another way."""
    chosen = []
    for inner in hugging_face_models(model):
        if not inner._can_set_experts_implementation():
            continue
        before = inner.config._experts_implementation
        if before != implementation:
            inner.config._experts_implementation = implementation
            chosen.append(str(before))
    return tuple(dict.fromkeys(chosen))
