"""What a model in one process is given in place of what torch would draw. That it is what exact
programs draw is tested form by form in tests/compiler/capture/rewrites/test_draws.py."""

import torch
from torch import Tensor
from torch.nn import functional as F

from meshfold.validation.alike_draws import alike_draws


def drawn() -> list[Tensor]:
    x = torch.ones(4, 2, 8, 8)
    return [
        F.dropout2d(x, 0.5, True),
        F.alpha_dropout(x, 0.5, True),
        x.new_empty(8).bernoulli_(0.5),
        x.new_empty(8).uniform_(),
        x.new_empty(8).uniform_(0, 3),
        x.new_empty(8).normal_(),
        x.new_empty(8).exponential_(),
        torch.rand(8, dtype=torch.bfloat16),
        torch.randint(0, 100, (8,)),
    ]


def test_calls_draw_alike_inside_and_anew_outside() -> None:
    with alike_draws():
        first, second = drawn(), drawn()
    assert all(a.equal(b) and a.dtype == b.dtype for a, b in zip(first, second, strict=True))
    assert all(len(x.unique()) > 1 for x in first)
    assert not torch.rand(8).equal(torch.rand(8))


def test_arguments_as_they_are_by_default_are_known() -> None:
    with alike_draws():
        half, uniform = torch.empty(64).bernoulli_(0.5), torch.rand(64)
        assert half.equal((uniform < 0.5).float())
        assert torch.empty(64).uniform_(0, 1).equal(uniform)
        assert torch.empty(64).normal_(0, 1).equal(torch.randn(64))


def test_other_ops_do_what_they_do() -> None:
    x = torch.arange(6.0)
    with alike_draws():
        assert (x + x).equal(2 * x) and torch.empty(3).fill_(2).equal(torch.full((3,), 2.0))
