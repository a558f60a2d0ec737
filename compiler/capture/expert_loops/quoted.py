"""A form that stands for quoted code: modules whose methods are that code get others instead."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from tokenize import TokenError
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Form:
    """codes: of methods, by path from the module ("router.forward"); methods: what takes the place
    of some of them; fits: whether a module with that code holds what the methods take it to."""

    codes: Mapping[str, str]
    methods: Mapping[str, Callable[..., Any]]
    fits: Callable[[Any], bool]

    def stands_for(self, module: nn.Module) -> bool:
        """Whether the methods compute what those of `module` do."""
        parts = dict(module.named_modules())
        for path, code in self.codes.items():
            owner, _, name = path.rpartition(".")
            if owner not in parts or not same_code(parts[owner], name, code):
                return False
        return self.fits(module)


def by_module(methods: Mapping[str, Callable[..., Any]]) -> dict[str, dict[str, Any]]:
    """Methods by the path of their module, then by name."""
    found: dict[str, dict[str, Any]] = {}
    for path, method in methods.items():
        owner, _, name = path.rpartition(".")
        found.setdefault(owner, {})[name] = method
    return found


def same_code(module: nn.Module, name: str, code: str) -> bool:
    """Whether a method of a module's class is `code`, but for annotations, docstring and layout,
    and the module has none of its own."""
    if name in vars(module):
        return False
    try:
        own = inspect.getsource(getattr(type(module), name))
    except (AttributeError, OSError, TypeError, TokenError):
        return False
    return _plain_code(own) == _plain_code(code)


def _plain_code(code: str) -> str:
    """A function's arguments and body, no matter how they are laid out; "" for anything else."""
    try:
        (function,) = ast.parse(textwrap.dedent(code)).body
    except (SyntaxError, ValueError):
        return ""
    if not isinstance(function, ast.FunctionDef) or function.decorator_list:
        return ""
    body = function.body[ast.get_docstring(function) is not None :]
    arguments = [argument.arg for argument in function.args.args]
    return ast.dump(ast.Module([*map(ast.Expr, map(ast.Name, arguments)), *body], []))
