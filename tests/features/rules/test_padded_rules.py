"""Padded shards: what may hold them, and that nothing beyond the end reaches a result.

The check of a rule fills the padding of operands with numbers (support.graphs.ops.BEYOND), that of
the cotangents with zeros, and asks for zeros in the padding of gradients.
"""

from collections.abc import Callable

import pytest
import torch
from support.graphs.ops import SingleOp, check_typings, mesh_of

from meshfold.ir.spmd import PaddedShard
from meshfold.passes.rules.ops.shards import PADDED, Divisions

CLASSES = 7
_ATTENTION = "aten.scaled_dot_product_attention.default"


def _random(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def _loss(reduction: int, weight: torch.Tensor | None = None, *more: float) -> SingleOp:
    targets = torch.tensor([0, 6, 3, -100, 5, 6])
    return SingleOp(
        "aten.cross_entropy_loss.default", _random(6, 7), targets, weight, reduction, *more
    )


KEPT: dict[str, tuple[str, Callable[[], SingleOp]]] = {
    "mean of losses": ("v/+", lambda: _loss(1)),
    "sum of losses": ("v/+", lambda: _loss(2)),
    "losses": ("v/+", lambda: _loss(0)),
    "smoothed losses": ("v/+", lambda: _loss(1, None, -100, 0.2)),
    "weighted losses": ("v/+", lambda: _loss(1, torch.rand(7).double(), -100, 0.2)),
    "embedding": (
        "v/+",
        lambda: SingleOp(
            "aten.embedding.default", _random(7, 4), torch.tensor([[0, 6], [3, 5]]), 3
        ),
    ),
    "head": (
        "o/+",
        lambda: SingleOp("aten.linear.default", _random(2, 4), _random(7, 4), _random(7)),
    ),
    "sum": ("d1/+", lambda: SingleOp("aten.add.Tensor", _random(2, 7), _random(7))),
    "difference": ("d1/+", lambda: SingleOp("aten.sub.Tensor", _random(2, 7), _random(2, 7))),
    "scale": ("d1/+", lambda: SingleOp("aten.div.Tensor", _random(2, 7), 3.0)),
    "product": ("d1/+", lambda: SingleOp("aten.mul.Tensor", _random(2, 7), _random(2, 7))),
    "tanh": ("d1/+", lambda: SingleOp("aten.tanh.default", _random(2, 7))),
    "cast": ("d1/+", lambda: SingleOp("aten.clone.default", _random(2, 7))),
    "view": ("d1/+", lambda: SingleOp("aten.view.default", _random(2, 3, 7), (6, 7))),
    "shift": ("d2/+", lambda: SingleOp("aten.slice.Tensor", _random(2, 3, 7), 1, 0, 2)),
    "everything": ("d1/+", lambda: SingleOp("aten.slice.Tensor", _random(2, 7), 1, 0, 7)),
    "transpose": ("d2/+", lambda: SingleOp("aten.transpose.int", _random(2, 3, 7), 1, 2)),
    "permute": ("d2/+", lambda: SingleOp("aten.permute.default", _random(2, 3, 7), (2, 0, 1))),
    "a contracted dim": (
        "k/+",
        lambda: SingleOp("aten.linear.default", _random(2, 7), _random(4, 7), _random(4)),
    ),
    "a merged dim": ("d0/2+7", lambda: SingleOp("aten.view.default", _random(2, 7), (14,))),
    "unsqueeze": ("d1/+", lambda: SingleOp("aten.unsqueeze.default", _random(2, 7), 0)),
}

MIXED: dict[str, Callable[[], SingleOp]] = {
    "a quotient by a tensor": lambda: SingleOp("aten.div.Tensor", _random(2, 7), _random(2, 7)),
    "exp of what may be large": lambda: SingleOp("aten.exp.default", _random(2, 7)),
    "softmax": lambda: SingleOp("aten._softmax.default", _random(2, 7), 1, False),
    "a sum": lambda: SingleOp("aten.sum.dim_IntList", _random(2, 7), [1]),
}


@pytest.mark.parametrize("what", KEPT)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_padding_reaches_no_result_and_no_gradient(what: str, size: int) -> None:
    name, make = KEPT[what]
    op, mesh = make(), mesh_of(size)
    found = [t for t in op.typings(size) if t.rules == (name,)]
    assert found, f"no rule {name}"
    check_typings(op, mesh, found)


@pytest.mark.parametrize("what", ["mean of losses", "head", "embedding", "view"])
def test_padding_beside_every_rule_of_another_axis(what: str) -> None:
    name, make = KEPT[what]
    op = make()
    found = [t for t in op.typings(2, 2) if name in t.rules]
    assert len(found) >= 4
    check_typings(op, mesh_of(2, 2), found)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("heads", "key_heads"), [(7, 1), (14, 2), (6, 2), (10, 5)])
def test_query_heads_are_padded_beside_unsharded_key_heads(
    heads: int, key_heads: int, is_causal: bool
) -> None:
    query, key = _random(2, heads, 4, 3), _random(2, key_heads, 4, 3)
    value = (1.0 + key.detach()).requires_grad_()
    op = SingleOp(_ATTENTION, query, key, value, is_causal=is_causal, enable_gqa=True)
    kinds = set()
    for size in (3, 4, 8):
        found = [t for t in op.typings(size) if "+" in t.rules[0]]
        kinds |= {(t.inputs[0][0].unit, str(t.inputs[1][0])) for t in found}
        check_typings(op, mesh_of(size), found)
    assert (1, "R") in kinds


@pytest.mark.parametrize("what", MIXED)
def test_what_mixes_has_no_padding(what: str) -> None:
    for size in (2, 3):
        op = MIXED[what]()
        for rule in op.axis_rules(size):
            pairs = zip(op.graph.values, (*rule.inputs, *rule.outputs), strict=True)
            assert not any(t.padded and value.shape[t.dim] == 7 for value, t in pairs), rule


def test_a_rank_holds_some_of_what_is_padded() -> None:
    """5 over 4 ranks would be 2, 2, 1 and nothing."""
    assert not Divisions(4)(5, PADDED)
    assert Divisions(4)(7, PADDED)
    assert not Divisions(2)(8, PADDED)
    assert Divisions(8)(50_257, PADDED)
    assert not Divisions(2)(7, 1)
    assert str(PaddedShard(1)) == "S1+"
