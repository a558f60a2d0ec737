"""The equation of an einsum, "bsd,edh->besh", as letters of its dims."""

from collections import Counter
from collections.abc import Sequence

_DOTS = "..."


def dims_of(equation: str, shapes: Sequence[Sequence[int]]) -> tuple[tuple[str, ...], ...] | None:
    """Letters per operand, then of the result; shapes: of the operands. Dims of an ellipsis are
    letters "e0", "e1", ..., the last of them in every term. A letter twice in a term is a diagonal.
    None where the terms are not of these operands."""
    given, arrow, result = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    letters = Counter("".join(terms).replace(".", ""))
    if not arrow:
        result = _DOTS * (_DOTS in given) + "".join(sorted(x for x, n in letters.items() if n == 1))
    bare = [term.replace(_DOTS, "") for term in (*terms, result)]
    if len(terms) != len(shapes):
        return None
    counts = [len(shape) - len(term) for term, shape in zip(bare, shapes, strict=False)]
    most = max(counts, default=0)
    return tuple(
        _spread(term, most - count, most)
        for term, count in zip((*terms, result), (*counts, most), strict=True)
    )


def _spread(term: str, first: int, end: int) -> tuple[str, ...]:
    """The letters of a term, whose ellipsis is of the dims from `first` to `end`."""
    before, dots, after = term.partition(_DOTS)
    between = [f"e{k}" for k in range(first, end)] if dots else []
    return (*before, *between, *after)
