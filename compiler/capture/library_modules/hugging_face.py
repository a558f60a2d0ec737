"""Models of Hugging Face, alone or inside a module of the user's (a loss, a trainer's wrapper), and
what of their configurations a program chooses."""

from collections.abc import Iterator
from typing import Any, cast

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
    # A configuration sets those within it, but not all are: of a model that is made of others some
    # can be set, and it itself cannot; experts may have been given a configuration of their own.
    for inner in cast("Iterator[Any]", model.modules()):
        if not _can_set_experts(inner):
            continue
        before = inner.config._experts_implementation
        if before != implementation:
            inner.config._experts_implementation = implementation
            chosen.append(str(before))
    return tuple(dict.fromkeys(chosen))


def _can_set_experts(module: Any) -> bool:
    """Whether the configuration of a model, or of experts, says how experts run."""
    if not hasattr(getattr(module, "config", None), "_experts_implementation"):
        return False
    if (can_set := getattr(module, "_can_set_experts_implementation", None)) is not None:
        return bool(can_set())
    return "is_concatenated" in vars(module)
