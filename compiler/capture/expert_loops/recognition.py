"""Recognises loops over experts in the source of a forward: which rows each expert gets, of what,
and where its results go.

    for e, expert in enumerate(self.experts):
        rows, slot = torch.where(ids == e)
        y[rows] += weights[rows, slot, None] * expert(x[rows])

is read as Loop(experts="self.experts", ids="ids", x="x", weights="weights", out="y", by="row").
The body of a loop is interpreted on the few kinds of values that such loops handle: masks of one
expert, rows chosen by them, what is gathered by rows, and results of the expert. A statement or an
expression of any other kind makes the loop unknown: it stays as it is.

What a loop does only so as to be fast is left out: skipping experts without rows, and going over
those alone that have some.
"""

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from meshfold.capture.expert_loops.expressions import (
    By,
    Expert,
    Expressions,
    Index,
    Mask,
    Places,
    Result,
    Unknown,
    Value,
    called,
    operand,
)


@dataclass(frozen=True)
class Loop:
    """A loop, all of it as source text. order: what the loop goes over, "" for all experts. ids:
    [..., k] or [...], the expert of each place. weights: what results are multiplied with, by
    place, or by expert (by_expert). adds: whether results are added to `out` or put there;
    in_place: in its memory."""

    experts: str
    order: str
    ids: str
    x: str
    out: str
    by: By
    adds: bool
    weights: str = ""
    by_expert: bool = False
    in_place: bool = True


_EMPTINESS = frozenset({"any", "sum", "numel", "size", "len", "nonzero", "count_nonzero", "item"})
_HITS = frozenset(
    {"unique", "nonzero", "greater", "gt", "sum", "tolist", "flatten", "squeeze", "view", "cpu"}
)
_FRESH = frozenset(
    {"zeros", "zeros_like", "empty", "empty_like", "new_zeros", "new_empty", "new_full", "full"}
)
_VIEWS = frozenset({"view", "reshape", "flatten", "view_as"})
_OF_HITS = (
    ast.Attribute,
    ast.Call,
    ast.Compare,
    ast.Constant,
    ast.Gt,
    ast.Load,
    ast.Name,
    ast.Tuple,
    ast.USub,
    ast.UnaryOp,
    ast.keyword,
)


def recognised(function: ast.FunctionDef, loop: ast.For) -> Loop | None:
    """What a loop in a function does; None if it is of no known kind."""
    try:
        return _Reader(function, loop).read()
    except Unknown:
        return None


class _Reader(Expressions):
    def __init__(self, function: ast.FunctionDef, loop: ast.For) -> None:
        super().__init__(function, loop)
        self.loop = loop
        self.found: Loop | None = None
        self.order = ""
        self.hits: ast.expr | None = None
        self.counted: list[ast.expr] = []
        self.asked: set[str] = set()

    def read(self) -> Loop:
        if self.loop.orelse:
            raise Unknown
        self._head()
        for statement in self.loop.body:
            self._statement(statement)
        if self.found is None:
            raise Unknown
        return replace(self.found, order=self.order)

    def _head(self) -> None:
        over, target = self.loop.iter, self.loop.target
        name = called(over)
        if name == "enumerate" and isinstance(over, ast.Call) and isinstance(target, ast.Tuple):
            if len(over.args) != 1 or over.keywords:
                raise Unknown
            index, expert = target.elts
            self._name(index, Index())
            self._name(expert, Expert(self.fixed(over.args[0])))
        elif name == "range":
            self._name(target, Index())
            self.order = self.fixed(over)
        else:
            self._name(target, Index())
            self.hits = self.resolved(over)

    def _name(self, target: ast.AST, value: Value) -> None:
        if not isinstance(target, ast.Name):
            raise Unknown
        self.values[target.id] = value

    def _statement(self, statement: ast.stmt) -> None:
        if self.found is not None:
            raise Unknown
        if isinstance(statement, ast.If):
            self._skips(statement)
        elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            self._assign(statement.targets[0], statement.value)
        elif isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add):
            self._put(statement.target, statement.value, adds=True)
        elif isinstance(statement, ast.Expr) and called(statement.value) == "index_add_":
            assert isinstance(statement.value, ast.Call)
            self._index_add(statement.value)
        else:
            raise Unknown

    def _skips(self, branch: ast.If) -> None:
        """An expert without rows may be skipped: it adds nothing."""
        skips = all(isinstance(s, ast.Continue) for s in branch.body)
        if branch.orelse or self._has_rows(branch.test) == skips:
            raise Unknown
        for inner in () if skips else branch.body:
            self._statement(inner)

    def _has_rows(self, test: ast.expr) -> bool:
        """Whether a test, one that asks only whether there are rows, is true if there are."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return not self._has_rows(test.operand)
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            if not isinstance(test.ops[0], ast.Eq | ast.Gt | ast.NotEq):
                raise Unknown
            self._number_of_rows(test.left)
            if ast.unparse(test.comparators[0]) != "0":
                raise Unknown
            return not isinstance(test.ops[0], ast.Eq)
        self._number_of_rows(test)
        return True

    def _number_of_rows(self, test: ast.expr) -> None:
        """Raises Unknown for what is not 0 or False without rows alone."""
        names = [n for n in ast.walk(test) if isinstance(n, ast.Name) and n.id != "torch"]
        asks = {called(n) for n in ast.walk(test) if isinstance(n, ast.Call)} <= _EMPTINESS
        numbers = {n.value for n in ast.walk(test) if isinstance(n, ast.Constant)} <= {0}
        chosen = all(
            isinstance(self.values.get(n.id), Mask | Places | Index) or n.id == "len"
            or self._counts(n) for n in names
        )  # fmt: skip
        if not (names and asks and numbers and chosen):
            raise Unknown
        for value in (self.values.get(n.id) for n in names):
            if isinstance(value, Mask | Places):
                self.asked.add(value.ids if isinstance(value, Mask) else value.mask.ids)

    def _counts(self, name: ast.Name) -> bool:
        """Whether a name stands for the numbers of rows of the experts."""
        found = self.resolved(name)
        self.counted.append(found)
        return "bincount" in {called(n) for n in ast.walk(found) if isinstance(n, ast.Call)}

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Subscript):
            if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
                if ast.unparse(value.left) != ast.unparse(target):
                    raise Unknown
                self._put(target, value.right, adds=True)
            else:
                self._put(target, value, adds=False)
            return
        if isinstance(target, ast.Name) and called(value) == "index_add":
            assert isinstance(value, ast.Call)
            if ast.unparse(operand(value)[0]) != target.id:
                raise Unknown
            self._index_add(value)
            assert self.found is not None
            self.found = replace(self.found, in_place=False)
            return
        found = self.value(value)
        if not isinstance(target, ast.Tuple):
            self._name(target, found)
        elif isinstance(found, Places):
            for dim, name in enumerate(target.elts):
                self._name(name, replace(found, dim=dim, count=len(target.elts)))
        else:
            raise Unknown

    def _put(self, target: ast.expr, value: ast.expr, *, adds: bool) -> None:
        if not isinstance(target, ast.Subscript):
            raise Unknown
        ids, by = self.rows(target.slice)
        self._finish(ast.unparse(target.value), ids, by, self.value(value), adds)

    def _index_add(self, call: ast.Call) -> None:
        out, (dim, rows, *values) = operand(call)
        if ast.unparse(dim) != "0" or len(values) != 1 or call.keywords:
            raise Unknown
        self._finish(ast.unparse(out), *self.rows(rows), self.value(values[0]), True)

    def _finish(self, out: str, ids: str, by: By, value: Value, adds: bool) -> None:
        if not isinstance(value, Result) or (value.rows.ids, value.rows.by) != (ids, by):
            raise Unknown
        weights = value.weights
        if by == "row" and not adds:
            raise Unknown  # the last of several results would stay
        text = weights.source if weights else ""
        read = self._behind(f"({value.rows.source}, {ids}, {text or None})")
        if read & self._memory(out):
            raise Unknown  # an expert might read what another has written
        names = {n.id for n in ast.walk(ast.parse(ids)) if isinstance(n, ast.Name)}
        if self.asked - {ids}:
            raise Unknown
        for counted in self.counted:
            if not names <= {n.id for n in ast.walk(counted) if isinstance(n, ast.Name)}:
                raise Unknown
        if self.hits is not None and not self._are_hits(self.hits, ids):
            raise Unknown
        by_expert = weights is not None and weights.by_expert
        self.found = Loop(value.expert, "", ids, value.rows.source, out, by, adds, text, by_expert)

    def _behind(self, text: str) -> set[str]:
        """Names that an expression is made of, and what those are made of, but for functions."""
        names: set[str] = set()
        new = {text}
        while new:
            nodes = [n for t in new for n in ast.walk(ast.parse(t))]
            heads = {id(n.func) for n in nodes if isinstance(n, ast.Call)}
            found = {n.id for n in nodes if isinstance(n, ast.Name) and id(n) not in heads}
            new = {ast.unparse(e) for name in found - names for e in self.before.get(name, ())}
            names |= found
        return names - {"torch", "self", "F"}

    def _memory(self, out: str, seen: frozenset[str] = frozenset()) -> set[str]:
        """The names of memory that is its own, whichever way the loop is reached: `out`, and those
        of which it is a view. Raises Unknown for other memory."""
        made = self.before.get(out, [])
        names = {out}
        for node in made:
            if called(node) in _VIEWS and isinstance(node, ast.Call):
                source, _ = operand(node)
                if not isinstance(source, ast.Name) or source.id in seen | {out}:
                    raise Unknown
                names |= self._memory(source.id, seen | {out})
            elif called(node) not in _FRESH:
                raise Unknown
        if not made:
            raise Unknown
        return names

    def _are_hits(self, node: ast.expr, ids: str) -> bool:
        """Whether an expression gives every expert that has rows, and no other thing."""
        asks = {called(n) for n in ast.walk(node) if isinstance(n, ast.Call)}
        if not asks <= _HITS or not asks & {"unique", "nonzero"}:
            return False
        if any(
            isinstance(n, ast.Compare) and not isinstance(n.ops[0], ast.Gt) for n in ast.walk(node)
        ):
            return False
        if not all(isinstance(n, _OF_HITS) for n in ast.walk(node)):
            return False
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} - {"torch"}
        of_ids = {n.id for n in ast.walk(ast.parse(ids)) if isinstance(n, ast.Name)} | {
            name for name in names if self.one_hot(ast.Name(name)) == ids
        }
        numbers = {
            n.value
            for n in ast.walk(node)
            if isinstance(n, ast.Constant) and isinstance(n.value, int)
        }
        return names <= of_ids and numbers <= {0, 1, 2} and ("nonzero" not in asks or 0 in numbers)


def rewritten(function: ast.FunctionDef, replacement: Callable[[Loop], ast.stmt]) -> bool:
    """Replace the loops of `function` that are known; whether there is one."""
    found: list[ast.For] = []

    class _Replacer(ast.NodeTransformer):
        def visit_For(self, node: ast.For) -> ast.AST:
            loop = recognised(function, node)
            if loop is None:
                return self.generic_visit(node)
            found.append(node)
            statement = replacement(loop)
            for part in ast.walk(statement):
                ast.copy_location(part, node)
            return statement

    _Replacer().visit(function)
    _drop_unread(function, found)
    ast.fix_missing_locations(function)
    return bool(found)


def _drop_unread(function: ast.FunctionDef, loops: Sequence[ast.For]) -> None:
    """Drop assignments to names that only the loops read: they may ask for values."""
    read = {n.id for loop in loops for n in ast.walk(loop) if isinstance(n, ast.Name)}
    while True:
        loaded = {
            n.id
            for n in ast.walk(function)
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
        }
        dropped: list[ast.Assign] = []

        class _Dropper(ast.NodeTransformer):
            def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
                (target, *_) = node.targets
                if isinstance(target, ast.Name) and target.id in read - loaded:  # noqa: B023
                    dropped.append(node)  # noqa: B023
                    return None
                return node

        _Dropper().visit(function)
        if not dropped:
            return
        read |= {n.id for a in dropped for n in ast.walk(a) if isinstance(n, ast.Name)}
