"""The equation of an einsum, "bsd,edh->besh", as letters of its dims."""

from collections.abc import Sequence


def dims_of(equation: str, shapes: Sequence[Sequence[int]]) -> tuple[tuple[str, ...], ...] | None:
    """Letters per operand, then of the result; shapes: of the operands. None for what letters alone
    do not say: an ellipsis, a result that is not written out, a diagonal."""
    given, arrow, result = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    if not arrow or "." in equation or len(terms) != len(shapes):
        return None
    if any(len(set(term)) < len(term) for term in (*terms, result)):
        return None
    assert all(len(t) == len(shape) for t, shape in zip(terms, shapes, strict=True)), equation
    return tuple(map(tuple, (*terms, result)))
