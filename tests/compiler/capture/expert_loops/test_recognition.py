"""What is recognised of loops over experts, and what is not."""

import ast

import pytest

from meshfold.capture.expert_loops.recognition import Loop, recognised, rewritten

HEAD = """
def forward(self, x):
    weights, ids = self.route(x)
    y = torch.zeros_like(x)
    alias = x
    counts = torch.bincount(ids.flatten()).tolist()
    other = torch.bincount(x.flatten()).tolist()
    hit = ids.unique()
    some = ids.unique()[1:]
    mask = one_hot(ids, 4).permute(2, 1, 0)
"""
WHERE = "rows, k = torch.where(ids == e)"
PUT = "y[rows] += weights[rows, k, None] * self.experts[e](x[rows])"
RANGE = "for e in range(4):"


def read(head: str, *body: str) -> Loop | None:
    lines = [HEAD, f"    {head}\n", *(f"        {line}\n" for line in body), "    return y\n"]
    (function,) = ast.parse("".join(lines)).body
    assert isinstance(function, ast.FunctionDef)
    (loop,) = [n for n in ast.walk(function) if isinstance(n, ast.For)]
    return recognised(function, loop)


ROW = Loop("self.experts", "range(4)", "ids", "x", "y", "row", True, "weights")

SLOT = "y[m] += weights[m, slot].unsqueeze(-1) * self.experts[e](x[m])"
IN_SLOT = Loop(
    "self.experts", "range(4)", "ids[:, slot]", "x", "y", "place", True, "weights[:, slot]"
)


@pytest.mark.parametrize(
    ("body", "loop"),
    [
        ((WHERE, PUT), ROW),
        ((WHERE, "if rows.numel() == 0: continue", PUT), ROW),
        (("m = ids == e", "if m.any():", "    rows, k = torch.where(m)", f"    {PUT}"), ROW),
        (("if not counts[e] > 0: continue", WHERE, PUT), ROW),
        (("k, rows = torch.where(mask[e])", PUT), ROW),
        ((WHERE, "w = weights[rows, k].unsqueeze(-1)", PUT.replace("weights[rows, k, None]", "w")),
         ROW),
        (
            (WHERE, "y = y.index_add(0, rows, self.experts[e](x[rows]).to(y.dtype))"),
            Loop("self.experts", "range(4)", "ids", "x", "y", "row", True, in_place=False),
        ),
        (("m = ids[:, slot] == e", SLOT), IN_SLOT),
        (("m = ids[:, slot] == e", SLOT.replace("(x[m])", "(x[m]).squeeze(1)")), IN_SLOT),
    ],
)  # fmt: skip
def test_a_loop_is_read(body: tuple[str, ...], loop: Loop) -> None:
    assert read(RANGE, *body) == loop


@pytest.mark.parametrize(
    "body",
    [
        (WHERE, "if rows.numel() == 0: break", PUT),
        (WHERE, "if rows.numel() > 0: continue", PUT),
        (WHERE, "if rows.numel() == 3: continue", PUT),
        ("if other[e] == 0: continue", WHERE, PUT),
        ("m = x == e", "if m.any():", f"    {WHERE}", f"    {PUT}"),
        (WHERE, PUT, PUT),
        (WHERE, PUT.replace("+=", "=")),
        (WHERE, PUT.replace("y[rows]", "alias[rows]")),
        (WHERE, PUT.replace("y[rows]", "x[rows]")),
        (WHERE, PUT.replace("x[rows]", "x[k]")),
        (WHERE, PUT.replace("x[rows]", "y[rows]")),
        (WHERE, PUT.replace("x[rows]", "x[rows] * 2")),
        (WHERE, PUT.replace(", None]", "]")),
        (WHERE, PUT.replace("weights[rows, k, None]", "weights[k, rows, None]")),
        (WHERE, PUT.replace("(x[rows])", "(x[rows], e)")),
        (WHERE.replace("==", ">="), PUT),
        (WHERE, "x = x + 1", PUT),
        (WHERE, f"with torch.no_grad(): {PUT}"),
        ("rows, k = torch.where(mask[e])", PUT.replace("x[rows]", "x[k]")),
        ("m = ids[:, 0] == e", SLOT),
        ("m = ids[..., slot] == e", SLOT),
        ("m = ids[:, slot] == e", SLOT.replace("(x[m])", "(x[m]).squeeze(0)")),
    ],
)
def test_any_other_loop_is_not(body: tuple[str, ...]) -> None:
    assert read(RANGE, *body) is None


def test_going_over_the_experts_that_have_rows() -> None:
    assert read("for e in hit:", WHERE, PUT) is not None
    assert read("for e in ids.unique():", WHERE, PUT) is not None
    assert read("for e in (mask.sum((-1, -2)) > 0).nonzero():", WHERE, PUT) is not None
    assert read("for e in (mask.sum((-1, -2)) > 1).nonzero():", WHERE, PUT) is None
    assert read("for e in some:", WHERE, PUT) is None
    assert read("for e in x.unique():", WHERE, PUT) is None
    assert read("for e, expert in enumerate(self.experts, 1):", WHERE, PUT) is None


def test_what_only_the_loop_reads_goes_with_it() -> None:
    source = HEAD + f"    for e in hit:\n        {WHERE}\n        {PUT}\n    return y, some\n"
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    assert rewritten(function, lambda loop: ast.parse(f"{loop.out} = new").body[0])
    assert "hit" not in ast.unparse(function) and "some = " in ast.unparse(function)
    assert "y = new" in ast.unparse(function)
