"""The few kinds of values that a loop over experts handles, read from its expressions.

    torch.where(ids == e)       the places at which ids name the expert
    x[rows]                     what is gathered there
    expert(x[rows])             a result, times weights[rows, slot, None]

Names and expressions that the loop does not change are kept as source text.
"""

import ast
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

By = Literal["place", "row", "any"]
"""What the ids of shape [..., k] choose: a place of ids is a row of x; a row of x stands for the k
places of its ids, each with a result; or a row is chosen once if any of its places is."""


class Unknown(Exception):
    """The loop is of no known kind."""


@dataclass(frozen=True)
class Index:
    """The number of the expert."""


@dataclass(frozen=True)
class Expert:
    name: str


@dataclass(frozen=True)
class Mask:
    """ids == e; by "any": along the last dim. reversed: as one_hot(ids).permute(2, 1, 0)[e]."""

    ids: str
    by: By = "place"
    reversed: bool = False


@dataclass(frozen=True)
class Places:
    """torch.where of a mask: an index per dim; or one of those, `dim`."""

    mask: Mask
    dim: int | None = None
    count: int | None = None


@dataclass(frozen=True)
class Gathered:
    """Rows of `source`."""

    source: str
    ids: str
    by: By
    by_expert: bool = False
    is_column: bool = False


@dataclass(frozen=True)
class Result:
    """What the expert makes of rows, times weights."""

    expert: str
    rows: Gathered
    weights: Gathered | None = None


Value = Index | Expert | Mask | Places | Gathered | Result

_CASTS = frozenset({"to", "type_as", "type"})
_COPIES = frozenset({"contiguous", "clone"})
_AS_COLUMN = frozenset({"unsqueeze", "view", "reshape"})


def called(node: ast.AST) -> str:
    """The last name of what a call calls, "" for anything else."""
    if not isinstance(node, ast.Call):
        return ""
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)


def operand(call: ast.Call) -> tuple[ast.expr, list[ast.expr]]:
    """The first operand and the other arguments of torch.f(x, ...) or x.f(...)."""
    if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) not in ("torch", "F"):
        return call.func.value, call.args
    if not call.args:
        raise Unknown
    return call.args[0], call.args[1:]


def _squeezes(name: str, arguments: list[ast.expr]) -> bool:
    """Whether results [rows, d] stay as they are: with a d of 1 they could not be put in place."""
    return name == "squeeze" and [ast.unparse(a) for a in arguments] in (["1"], ["-1"])


class Expressions:
    """What the expressions in the body of a loop stand for. `values` are those of its names."""

    def __init__(self, function: ast.FunctionDef, loop: ast.For) -> None:
        self.values: dict[str, Value] = {}
        self.assigned = {
            n.id for n in ast.walk(loop) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        }
        self.before: dict[str, list[ast.expr]] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and node.lineno < loop.lineno:
                for name in (n for n in ast.walk(node.targets[0]) if isinstance(n, ast.Name)):
                    if isinstance(name.ctx, ast.Store):
                        self.before.setdefault(name.id, []).append(node.value)

    def fixed(self, node: ast.AST) -> str:
        """The source of an expression that the loop does not change."""
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        if names & (self.assigned | set(self.values)):
            raise Unknown
        return ast.unparse(node)

    def resolved(self, node: ast.expr) -> ast.expr:
        """What a name stands for, if it is assigned once."""
        seen: set[str] = set()
        while isinstance(node, ast.Name) and len(self.before.get(node.id, ())) == 1:
            if node.id in seen:
                raise Unknown
            seen.add(node.id)
            (node,) = self.before[node.id]
        return node

    def value(self, node: ast.expr) -> Value:
        if isinstance(node, ast.Name) and node.id in self.values:
            return self.values[node.id]
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq):
            return self._equal(node.left, node.comparators[0])
        if isinstance(node, ast.Subscript):
            return self._subscript(node)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            return self._product(self.value(node.left), self.value(node.right))
        if isinstance(node, ast.Call):
            return self._call(node)
        raise Unknown

    def _equal(self, left: ast.expr, right: ast.expr) -> Mask:
        if not self._is_index(right):
            left, right = right, left
        if not self._is_index(right):
            raise Unknown
        return Mask(self.fixed(left))

    def _is_index(self, node: ast.expr) -> bool:
        if called(node) in ("item", "int") and isinstance(node, ast.Call):
            return self._is_index(operand(node)[0])
        return isinstance(node, ast.Name) and isinstance(self.values.get(node.id), Index)

    def _call(self, node: ast.Call) -> Value:
        name = called(node)
        function = self._maybe(node.func)
        if isinstance(function, Expert) and len(node.args) == 1 and not node.keywords:
            rows = self.value(node.args[0])
            if isinstance(rows, Gathered):
                return Result(function.name, rows)
            raise Unknown
        if any(k.arg not in ("dim", "as_tuple", "dtype", "index") for k in node.keywords):
            raise Unknown
        source, others = operand(node)
        if name == "eq" and len(others) == 1:
            return self._equal(source, others[0])
        value = self.value(source)
        if isinstance(value, Mask):
            return self._of_mask(name, value, others, node.keywords)
        if isinstance(value, Result) and (name in _CASTS | _COPIES or _squeezes(name, others)):
            return value
        if isinstance(value, Gathered) and name in _COPIES:
            return value
        if isinstance(value, Gathered) and name in _AS_COLUMN:
            return replace(value, is_column=True)
        if name in ("squeeze", "flatten", "view", "reshape") and isinstance(value, Places):
            return value
        raise Unknown

    def _of_mask(
        self, name: str, mask: Mask, others: list[ast.expr], keywords: list[ast.keyword]
    ) -> Value:
        arguments = [ast.unparse(a) for a in (*others, *(k.value for k in keywords))]
        if name == "any" and arguments in (["-1"], ["1"]) and not mask.reversed:
            return replace(mask, by="any")
        if name == "where" and not arguments:
            return Places(mask)
        if name == "nonzero":
            is_tuple = arguments == ["True"]
            return Places(mask) if is_tuple else Places(mask, 0, 1)
        if (
            name in ("view", "flatten", "reshape")
            and mask.by == "any"
            and arguments in (["-1"], [])
        ):
            return mask
        if name == "squeeze" and mask.reversed:
            return mask
        raise Unknown

    def _maybe(self, node: ast.expr) -> Value | None:
        try:
            return self.value(node)
        except Unknown:
            return None

    def _subscript(self, node: ast.Subscript) -> Value:
        index = node.slice
        if self._is_index(index):
            if (ids := self.one_hot(node.value)) is not None:
                return Mask(ids, reversed=True)
            return Expert(self.fixed(node.value))
        value = self._maybe(node.value)
        number = index.value if isinstance(index, ast.Constant) else None
        if isinstance(value, Places) and value.dim is None and isinstance(number, int):
            return replace(value, dim=number, count=value.count)
        if isinstance(value, Gathered):  # weights[rows][:, None]
            if ast.unparse(index) not in ("(:, None)", ":, None", "(..., None)", "..., None"):
                raise Unknown
            return replace(value, is_column=True)
        parts = list(index.elts) if isinstance(index, ast.Tuple) else [index]
        is_column = len(parts) > 1 and ast.unparse(parts[-1]) == "None"
        by_expert = len(parts) == 2 + is_column and self._is_index(parts[1])
        rows = parts[: len(parts) - is_column - by_expert]
        if ast.unparse(rows[0]) == "None":  # x[None, rows] that a reshape makes rows of
            rows = rows[1:]
        source = self.fixed(node.value)
        if (slot := self._slot(rows)) is not None:
            source, rows = f"{source}{slot}", rows[:1]
        chosen = ast.Tuple(rows, ast.Load()) if len(rows) > 1 else rows[0]
        ids, by = self.rows(chosen)
        return Gathered(source, ids, by, by_expert, is_column)

    def _slot(self, rows: list[ast.expr]) -> str | None:
        """Of weights[mask, k], where the mask is of ids[:, k], what takes weights as ids are taken:
        "[:, k]". It has as many dims in front of k as the mask."""
        if len(rows) != 2 or not isinstance(rows[1], ast.Name | ast.Constant):
            return None
        mask = self._maybe(rows[0])
        if isinstance(mask, Places) and mask.count == 1 and mask.dim == 0:
            mask = mask.mask
        if not isinstance(mask, Mask) or mask.by != "place" or mask.reversed:
            return None
        slot = f"[:, {self.fixed(rows[1])}]"
        return slot if mask.ids.endswith(slot) else None

    def one_hot(self, node: ast.expr) -> str | None:
        """The ids of which `node` is one_hot(ids, ...).permute(2, 1, 0)."""
        found = self.resolved(node)
        if called(found) != "permute" or not isinstance(found, ast.Call):
            return None
        hot, dims = operand(found)
        hot = self.resolved(hot)
        if called(hot) != "one_hot" or ast.unparse(ast.Tuple(dims, ast.Load())) != "(2, 1, 0)":
            return None
        assert isinstance(hot, ast.Call)
        return self.fixed(hot.args[0])

    def rows(self, index: ast.expr) -> tuple[str, By]:
        """(ids, what of them) that an index of rows stands for."""
        parts = list(index.elts) if isinstance(index, ast.Tuple) else [index]
        if len(parts) > 1 and ast.unparse(parts[-1]) == ":":
            parts.pop()
        found = [self.value(part) for part in parts]
        if len(found) == 1 and isinstance(found[0], Mask) and not found[0].reversed:
            return found[0].ids, found[0].by
        places = [p for p in found if isinstance(p, Places)]
        if len(places) != len(found) or len({p.mask for p in places}) != 1:
            raise Unknown
        mask, count, dims = places[0].mask, places[0].count, [p.dim for p in places]
        if count is None:  # where(mask)[0]: of ids with one dim
            count = 1 + max(d or 0 for d in dims)
        order: Sequence[int] = range(count)[::-1] if mask.reversed else range(count)
        if dims == list(order):
            return mask.ids, mask.by
        if count > 1 and dims == list(order)[:-1] and mask.by == "place":
            return mask.ids, "row"
        raise Unknown

    def _product(self, left: Value, right: Value) -> Result:
        result, weights = (left, right) if isinstance(left, Result) else (right, left)
        if not isinstance(result, Result) or not isinstance(weights, Gathered):
            raise Unknown
        fits = weights.ids == result.rows.ids and weights.is_column and result.weights is None
        places = weights.by == "place" or (weights.by_expert and weights.by == result.rows.by)
        if not fits or not places:
            raise Unknown
        return replace(result, weights=weights)
