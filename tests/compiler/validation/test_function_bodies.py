"""Modes that see inside of torch's Python functions."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from meshfold.validation.alike_draws import without_dropout
from meshfold.validation.float64_mode import float64_everywhere
from meshfold.validation.function_bodies import SeeingMode


class Recorder(SeeingMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.seen.append(getattr(func, "__name__", ""))
        return self.run(func, args, kwargs or {})


def test_what_a_function_calls_is_seen_and_its_result_stays() -> None:
    x, weight = torch.randn(3, 4), torch.ones(4)
    with Recorder() as recorder:
        found = F.layer_norm(x, (4,), weight)
    assert torch.equal(found, F.layer_norm(x, (4,), weight))
    assert recorder.seen.count("layer_norm") == 2  # of torch.nn.functional, and of torch


def test_attention_with_dropout_inside_drops_nothing() -> None:
    x = torch.randn(2, 4, 8)
    attention = nn.MultiheadAttention(8, 2, dropout=0.9, batch_first=True)
    expected = nn.MultiheadAttention(8, 2, batch_first=True)
    expected.load_state_dict(attention.state_dict())
    for need_weights in (False, True):
        with without_dropout():
            found, _ = attention(x, x, x, need_weights=need_weights)
        right, _ = expected(x, x, x, need_weights=need_weights)
        assert torch.allclose(found, right, atol=1e-6)
        assert not torch.equal(attention(x, x, x)[0], right)


def test_every_function_with_dropout_inside_has_a_body_that_is_seen() -> None:
    names = [
        name
        for name, function in vars(F).items()
        if inspect.isfunction(function) and "dropout_p" in inspect.signature(function).parameters
    ]
    assert names == ["multi_head_attention_forward"]


def test_functions_with_a_dtype_inside_are_widened() -> None:
    with float64_everywhere():
        assert F.gumbel_softmax(torch.zeros(3)).dtype == torch.float64
