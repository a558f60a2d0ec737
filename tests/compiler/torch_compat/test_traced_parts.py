"""Composite ops in parts while torch.export traces, and results that autograd has kept."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.torch_compat.traced_parts import (
    AS_IT_IS,
    Part,
    in_parts,
    op_number,
    ops_between,
    read_kept_results,
)


class Sloped(nn.Module):
    """The slope of tanh after a softmax. splits: whether composite ops are written in parts."""

    def __init__(self, splits: bool) -> None:
        super().__init__()
        self.splits = splits

    def _on_call(self, part: Part, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return part(*args, **kwargs) if self.splits else AS_IT_IS

    def forward(self, x: Tensor) -> Tensor:
        with in_parts(self._on_call, {}) as kept:
            x = x.clone().requires_grad_()
            y = torch.softmax(x, -1).tanh().sum()
            if kept is not None:
                kept.tie()
            (found,) = torch.autograd.grad(y, x, create_graph=True)
        return found.sum()


def test_composite_ops_are_written_in_parts_on_demand() -> None:
    ops = {}
    for splits in (True, False):
        program = torch.export.export(Sloped(splits), (torch.ones(2, 3),), strict=False)
        ops[splits] = [str(n.target) for n in program.graph.nodes]
    assert "aten._softmax.default" in ops[True]
    assert "aten.softmax.int" not in ops[True]
    assert "aten.softmax.int" in ops[False]


def test_kept_results_are_read_from_the_ops_they_came_from() -> None:
    x = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3).square()
    program = torch.export.export(Sloped(True), (x,), strict=False)
    assert not program.constants
    targets = [str(n.target) for n in program.graph.nodes]
    assert "meshfold.kept_result.default" in targets
    read_kept_results(program.graph_module)
    targets = [str(n.target) for n in program.graph.nodes]
    assert "meshfold.kept_result.default" not in targets
    assert "aten.detach.default" not in targets
    program.graph_module.recompile()
    (found,) = program.graph_module(x)
    assert torch.allclose(found, Sloped(True)(x), rtol=1e-13, atol=1e-16)


def test_nothing_is_tied_where_nothing_is_traced() -> None:
    with in_parts(lambda *_: AS_IT_IS, {}) as kept:
        assert kept is None


def test_ops_between_lead_from_outputs_to_inputs() -> None:
    x, w = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    first = op_number()
    a = x.sin()
    b = w.cos()
    c = a * b
    after = op_number()
    assert after == first + 3
    assert {k for k in ops_between([c], [x]) if k < after} == {first, first + 2}
    assert {k for k in ops_between([c], [w]) if k < after} == {first + 1, first + 2}
    assert ops_between([c], [b]) == {first + 1, first + 2}
    assert ops_between([c.detach()], [x]) == set()
