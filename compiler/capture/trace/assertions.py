"""Branches on values that are assertions: one side of them only raises.

    assert labels.max() < vocab                    the test is True for every batch that trains
    if not x.isfinite().all(): raise ...           and this one False
    if mask.sum() == 0: warnings.warn(...)         a warning changes no number: False
    torch_compilable_check(count == n, ...)        a function that does no more than check
    if not mask.any(): mask = None                 what is left out says the same as None: False

Python asks for the truth of a value while it runs one instruction. Its position leads to the
expression in the source, and the expression up through not, and, or, all(), any() and names that
stand for it to the statement that decides. A branch whose two sides both compute decides nothing
here, and one whose exception is caught has two such sides.
"""

import ast
import dis
import linecache
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Literal

from meshfold.torch_compat.source_lines import validates_arguments

_LIBRARY_CHECKS = frozenset(
    {
        "_assert",
        "_assert_async",
        "_check",
        "_check_index",
        "_check_tensor_all",
        "_check_tensor_all_with",
        "_check_type",
        "_check_value",
        "_check_with",
        "torch_compilable_check",
    }
)
"""Functions of torch and transformers that check what they are given and do nothing else."""

_WARNS = frozenset({"print", "warn", "warning", "warning_once", "warn_once", "info", "debug"})
"""Functions and methods that tell somebody something."""

Kind = Literal["check", "warning", "shortcut"]
"""A check raises, a warning does not; a shortcut leaves out a mask that says nothing."""

_LONGEST = 100
"""Characters of an assertion that are shown."""


@dataclass(frozen=True)
class Assertion:
    """`holds`: the truth of the value that was asked about, with which the model goes on. `is_all`:
    whether that value alone decides; not for the first of `a or b`. called: the function whose
    argument or result the value is. is_always_run: whether the program is wrong where it fails, so
    that it is never left out."""

    source: str
    text: str
    holds: bool
    is_all: bool = True
    kind: Kind = "check"
    called: str = ""
    is_always_run: bool = False

    @property
    def note(self) -> str:
        """ "modeling_llama.py:12: assert ids.max() < vocab"."""
        return f"{os.path.basename(self.source)}: {self.text}"


class Sources:
    """Parsed files, each read once."""

    def __init__(self) -> None:
        self.files: dict[str, _File | None] = {}

    def assertion(self, frame: FrameType, is_check: bool) -> Assertion | None:
        """The assertion that a value belongs to whose truth, or whose number, `frame` asks for with
        its current instruction; None if there is none, or no source. is_check: that instruction
        calls a library's function that checks."""
        name = frame.f_code.co_filename
        file, position = self._file(name), _position(frame)
        node = file.expression(position) if file and position else None
        return None if file is None or node is None else _Climb(file, name).asked(node, is_check)

    def catches(self, frame: FrameType) -> bool:
        """Whether `frame` goes on after an exception in what it is doing now."""
        file = self._file(frame.f_code.co_filename)
        line = frame.f_lineno
        return file is not None and any(a <= line <= b for a, b in file.caught)

    def _file(self, name: str) -> "_File | None":
        if name not in self.files:
            self.files[name] = _File.read(name)
        return self.files[name]


_Position = tuple[int, int, int, int]
"""Line, column, last line and last column of code, columns in bytes."""


def _position(frame: FrameType) -> _Position | None:
    """Where the expression stands whose value the current instruction of `frame` tests or makes."""
    # While a call into Python runs, its frame stands behind the instruction.
    done = [i for i in dis.get_instructions(frame.f_code) if i.offset <= frame.f_lasti]
    asks = done.pop()
    if "JUMP" in asks.opname or asks.opname in ("UNARY_NOT", "TO_BOOL"):
        asks = next((i for i in reversed(done) if i.opname != "EXTENDED_ARG"), asks)
    p = asks.positions
    if p is None or p.lineno is None or p.col_offset is None:
        return None
    return p.lineno, p.col_offset, p.end_lineno or 0, p.end_col_offset or 0


@dataclass(frozen=True)
class _File:
    expressions: dict[_Position, ast.expr]
    ends: dict[tuple[int, int], ast.Call]
    parents: dict[ast.AST, ast.AST]
    caught: tuple[tuple[int, int], ...]
    """First and last lines of code whose exceptions are not passed on."""

    @staticmethod
    def read(name: str) -> "_File | None":
        """None without source."""
        linecache.checkcache(name)
        try:
            tree = ast.parse("".join(linecache.getlines(name)))
        except (SyntaxError, ValueError):
            return None
        parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        # Outer nodes come first: of nodes in one place the inner one stays.
        nodes = [n for n in parents if isinstance(n, ast.expr) and n.end_lineno is not None]
        places = {
            (n.lineno, n.col_offset, n.end_lineno or 0, n.end_col_offset or 0): n for n in nodes
        }
        ends = {place[2:]: n for place, n in places.items() if isinstance(n, ast.Call)}
        return _File(places, ends, parents, tuple(_caught(tree)))

    def expression(self, position: _Position) -> ast.expr | None:
        """A call of a method that goes over several lines is only known by its end."""
        return self.expressions.get(position) or self.ends.get(position[2:])

    def function(self, node: ast.AST) -> ast.AST | None:
        """The function that `node` stands in."""
        found: ast.AST | None = node
        while found is not None and not isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
            found = self.parents.get(found)
        return found


@dataclass(frozen=True)
class _Wanted:
    """`truth` that an expression has to have, for `statement`; see Assertion."""

    statement: ast.stmt | ast.expr
    truth: bool
    is_all: bool = True
    kind: Kind = "check"


class _Climb:
    """From an expression to the statement that decides on it."""

    def __init__(self, file: _File, name: str) -> None:
        self.file = file
        self.name = name

    def asked(self, node: ast.expr, is_check: bool) -> Assertion | None:
        called = _called(node) if isinstance(node, ast.Call) else ""
        is_check = is_check and isinstance(node, ast.Call)
        wanted = _Wanted(node, True) if is_check else self.wanted(node)
        if isinstance(node, ast.Compare):
            if len(node.ops) > 1:
                wanted = _early(wanted, False)
            elif isinstance(node.ops[0], ast.NotIn):  # asked is whether it contains
                wanted = _negated(wanted)
        if wanted is None:
            return None
        source = f"{self.name}:{wanted.statement.lineno}"
        text = _text(wanted.statement)
        return Assertion(source, text, wanted.truth, wanted.is_all, wanted.kind, called)

    def wanted(self, node: ast.AST) -> _Wanted | None:
        """What `node` has to be for the model to go on; None if it may be either."""
        parent = self.file.parents.get(node)
        if isinstance(parent, ast.Assert):
            return _Wanted(parent, True) if node is parent.test else None
        if isinstance(parent, ast.If):
            return self._wanted_by_if(parent) if node is parent.test else None
        if isinstance(parent, ast.IfExp) and node is parent.test:
            return _wanted_by_choice(parent)
        if isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not):
            return _negated(self.wanted(parent))
        if isinstance(parent, ast.BoolOp):
            return self._wanted_in(parent, node)
        if isinstance(parent, ast.Call) and node in parent.args:
            if _checks(parent):
                return _Wanted(parent, True)
            return self.wanted(parent) if _called(parent) == "bool" else None
        if isinstance(parent, ast.GeneratorExp | ast.ListComp):
            return self._wanted_of_many(parent) if node is parent.elt else None
        if isinstance(parent, ast.List | ast.Tuple):
            return self._wanted_of_many(parent)
        if isinstance(parent, ast.Assign):
            return self._wanted_by_name(parent)
        return None

    def _wanted_in(self, parent: ast.BoolOp, node: ast.AST) -> _Wanted | None:
        """`and` that must be True wants both; `and` that must be False the last, whatever decides
        before it."""
        found = self.wanted(parent)
        is_last = node is parent.values[-1]
        return found if is_last else _early(found, isinstance(parent.op, ast.Or))

    def _wanted_of_many(self, values: ast.expr) -> _Wanted | None:
        """all(values), any(values)"""
        call = self.file.parents.get(values)
        if not isinstance(call, ast.Call) or _called(call) not in ("all", "any"):
            return None
        return _early(self.wanted(call), _called(call) == "any")

    def _wanted_by_if(self, branch: ast.If) -> _Wanted | None:
        if _raises(branch.body):
            return _Wanted(branch, False)
        if _raises(branch.orelse):
            return _Wanted(branch, True)
        if validates_arguments(self.name) and _returns_what_fails(branch):
            return _Wanted(branch, False)
        if isinstance(branch.body[-1], ast.Return) and not branch.orelse:
            return _Wanted(branch, True) if _raises(self._rest(branch)[:1]) else None
        if _warns(branch.body) and not branch.orelse:
            return _Wanted(branch, False, kind="warning")
        if _leaves_out(branch):
            return _Wanted(branch, False, kind="shortcut")
        return None

    def _rest(self, statement: ast.stmt) -> Sequence[ast.stmt]:
        """What follows a statement in its block."""
        parent = self.file.parents[statement]
        for _, block in ast.iter_fields(parent):
            if isinstance(block, list) and statement in block:
                return block[block.index(statement) + 1 :]
        return ()

    def _wanted_by_name(self, assignment: ast.Assign) -> _Wanted | None:
        """What all that reads the name wants, if it is assigned once."""
        function = self.file.function(assignment)
        (target, *others) = assignment.targets
        if function is None or others or not isinstance(target, ast.Name):
            return None
        uses = [n for n in ast.walk(function) if isinstance(n, ast.Name) and n.id == target.id]
        reads = [n for n in uses if isinstance(n.ctx, ast.Load) and not self._is_told(n)]
        if len(uses) - sum(isinstance(n.ctx, ast.Load) for n in uses) != 1:
            return None
        wanted = [self.wanted(read) for read in reads]
        truths = {w.truth if w else None for w in wanted}
        return wanted[0] if len(truths) == 1 and wanted[0] else None

    def _is_told(self, node: ast.AST) -> bool:
        """Whether an expression is only printed: in an f-string."""
        return isinstance(self.file.parents.get(node), ast.FormattedValue)


def _caught(tree: ast.AST) -> Iterator[tuple[int, int]]:
    for node in ast.walk(tree):
        is_try = isinstance(node, ast.Try) and any(not _raises(h.body) for h in node.handlers)
        is_with = isinstance(node, ast.With) and any(
            _called(i.context_expr) == "suppress"
            for i in node.items
            if isinstance(i.context_expr, ast.Call)
        )
        if isinstance(node, ast.Try | ast.With) and (is_try or is_with):
            yield node.body[0].lineno, node.body[-1].end_lineno or node.body[-1].lineno


def _negated(wanted: _Wanted | None) -> _Wanted | None:
    if wanted is None:
        return None
    return _Wanted(wanted.statement, not wanted.truth, wanted.is_all, wanted.kind)


def _early(wanted: _Wanted | None, truth: bool) -> _Wanted | None:
    """What is wanted of one of several values, of which the first that is `truth` decides."""
    if wanted is None or wanted.truth != truth:
        return wanted
    return _Wanted(wanted.statement, truth, False, wanted.kind)


def _called(call: ast.Call) -> str:
    """The last name of what is called."""
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _checks(call: ast.Call) -> bool:
    """Whether a call is spelled as one of a library's function that checks."""
    name = ast.unparse(call.func)
    of_library = name.startswith("torch.") or name.endswith("torch_compilable_check")
    return of_library and _called(call) in _LIBRARY_CHECKS


def is_library_check(frame: FrameType) -> bool:
    """Whether `frame` is inside of a library's function that checks."""
    library = str(frame.f_globals.get("__name__")).partition(".")[0]
    return library in ("torch", "transformers") and frame.f_code.co_name in _LIBRARY_CHECKS


def _raises(block: Sequence[ast.stmt]) -> bool:
    """Whether every way through a block ends in an exception."""
    last = block[-1] if block else None
    if isinstance(last, ast.If):
        return _raises(last.body) and _raises(last.orelse)
    if isinstance(last, ast.Assert):
        return isinstance(last.test, ast.Constant) and not last.test.value
    return isinstance(last, ast.Raise)


def _returns_what_fails(branch: ast.If) -> bool:
    """Whether a branch is `if not valid.all(): return valid`, as constraints of torch have it: what
    asked for the constraint raises then."""
    match branch:
        case ast.If(
            test=ast.UnaryOp(ast.Not(), ast.Call(ast.Attribute(ast.Name(tested), "all"))),
            body=[ast.Return(ast.Name(returned))],
            orelse=[],
        ):
            return tested == returned
    return False


def _leaves_out(branch: ast.If) -> bool:
    """Whether a branch only leaves out a mask that says nothing: `if mask.all(): mask = None`, or
    with another mask as its other side. Whoever takes a mask takes None for none."""
    match branch:
        case ast.If(test, [ast.Assign([ast.Name(name)], ast.Constant(None))], other):
            read = {n.id for n in ast.walk(test) if isinstance(n, ast.Name)}
            made = [s for s in other if isinstance(s, ast.Assign)]
            names = {t.id for s in made for t in s.targets if isinstance(t, ast.Name)}
            is_other = len(made) == len(other) and name in names if other else name in read
            return is_other and _says_nothing(test, True)
    return False


def _wanted_by_choice(choice: ast.IfExp) -> _Wanted | None:
    """`None if mask.all() else mask`, `mask if mask.any() else None`."""
    left_out, kept = (
        isinstance(side, ast.Constant) and side.value is None
        for side in (choice.body, choice.orelse)
    )
    if left_out == kept or not _says_nothing(choice.test, left_out):
        return None
    return _Wanted(choice, not left_out, kind="shortcut")


def _says_nothing(test: ast.expr, truth: bool) -> bool:
    """Whether a test that is `truth` says that all of a mask is True, or that none of it is."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _says_nothing(test.operand, not truth)
    return isinstance(test, ast.Call) and _called(test) == ("all" if truth else "any")


def _warns(block: Sequence[ast.stmt]) -> bool:
    return all(
        isinstance(s, ast.Expr) and isinstance(s.value, ast.Call) and _called(s.value) in _WARNS
        for s in block
    )


def _text(statement: ast.stmt | ast.expr) -> str:
    """How a statement is shown."""
    if isinstance(statement, ast.Assert):
        text = f"assert {ast.unparse(statement.test)}"
    elif isinstance(statement, ast.If):
        test = ast.unparse(statement.test)
        text = f"if {test}: ..." if _warns(statement.body) else f"if {test}: raise"
        if not _raises(statement.body) and not _warns(statement.body):
            text = f"if {test}: ... else: raise"
    else:
        text = ast.unparse(statement)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
