"""Expressions of loops over experts, and what they stand for."""

import ast

import pytest

from meshfold.capture.expert_loops.expressions import (
    Expressions,
    Gathered,
    Index,
    Mask,
    Places,
    Unknown,
    called,
    operand,
)

SOURCE = """
def forward(self, x):
    hot = one_hot(ids, 4)
    mask = hot.permute(2, 1, 0)
    a = b
    b = a
    for e in range(4):
        pass
"""


def expressions() -> Expressions:
    (function,) = ast.parse(SOURCE).body
    assert isinstance(function, ast.FunctionDef)
    (loop,) = [n for n in ast.walk(function) if isinstance(n, ast.For)]
    found = Expressions(function, loop)
    found.values["e"] = Index()
    found.values["m"] = Mask("ids")
    found.values["r"] = Places(Mask("ids"), 0, 2)
    found.values["k"] = Places(Mask("ids"), 1, 2)
    return found


def parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("ids == e", Mask("ids")),
        ("int(e) == ids", Mask("ids")),
        ("ids.eq(e.item())", Mask("ids")),
        ("torch.eq(ids, e).any(dim=-1)", Mask("ids", "any")),
        ("mask[e].squeeze(0)", Mask("ids", reversed=True)),
        ("m.nonzero(as_tuple=True)[0]", Places(Mask("ids"), 0)),
        ("x[m]", Gathered("x", "ids", "place")),
        ("x[r]", Gathered("x", "ids", "row")),
        ("x[r, :].clone()", Gathered("x", "ids", "row")),
        ("x[None, r].reshape(-1, d)", Gathered("x", "ids", "row", is_column=True)),
        ("w[r, k, None]", Gathered("w", "ids", "place", is_column=True)),
        ("w[r, k][:, None]", Gathered("w", "ids", "place", is_column=True)),
        ("w[r, e].unsqueeze(1)", Gathered("w", "ids", "row", True, True)),
    ],
)
def test_what_an_expression_stands_for(text: str, value: object) -> None:
    assert expressions().value(parsed(text)) == value


@pytest.mark.parametrize(
    "text",
    ["ids != e", "ids == 3", "x[k]", "x[k, r]", "m.any(0)", "x[r].float()", "m + m", "a[e]()"],
)
def test_what_is_of_no_known_kind(text: str) -> None:
    with pytest.raises(Unknown):
        expressions().value(parsed(text))


def test_names_that_stand_for_each_other_stand_for_nothing() -> None:
    with pytest.raises(Unknown):
        expressions().resolved(parsed("a"))


def test_calls_and_their_operands() -> None:
    call = parsed("torch.eq(ids, e)")
    assert isinstance(call, ast.Call)
    assert called(call) == "eq" and ast.unparse(operand(call)[0]) == "ids"
    assert called(parsed("x")) == ""
