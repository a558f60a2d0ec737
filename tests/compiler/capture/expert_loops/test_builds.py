"""Which experts one forward may run for."""

import torch
from torch import nn

from meshfold.capture.expert_loops.builds import are_alike, has_only


def pair(*parts: nn.Module) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(2, 3), *parts), nn.Sequential(nn.Linear(2, 3), *parts)]


def test_experts_that_differ_in_values_are_alike() -> None:
    assert are_alike(pair(nn.ReLU()))


def test_experts_that_differ_in_anything_else_are_not() -> None:
    assert not are_alike([pair()[0], nn.Sequential(nn.Linear(2, 4))])
    assert not are_alike([pair()[0], nn.Linear(2, 3)])
    assert not are_alike(pair(nn.PReLU())), "holds more than linears"
    assert not are_alike(pair(nn.BatchNorm1d(3, affine=False)))
    assert not are_alike([nn.ReLU(), nn.ReLU()])
    first, second = pair()
    second.register_buffer("scale", torch.ones(1))
    assert not are_alike([first, second])


def test_a_list_may_hold_none_where_a_module_is_left_out() -> None:
    left_out = nn.ModuleList([*pair(), None])  # type: ignore[list-item]
    assert not are_alike(list(left_out))


def test_what_an_expert_holds() -> None:
    expert = nn.Module()
    expert.wi = nn.Linear(2, 3, bias=False)
    assert has_only(expert, ("wi",))
    expert.wo = nn.Linear(3, 2)
    assert not has_only(expert, ("wi", "wo")), "a bias"
