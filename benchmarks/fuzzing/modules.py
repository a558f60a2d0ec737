"""Cases of bad modules of a user: factories that fail, end the process, or return nonsense."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from fuzzing.case import Case
from fuzzing.contents import Maker
from fuzzing.plans import with_plan

HEAD = """import sys, torch
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)
    def forward(self, x, y):
        return nn.functional.mse_loss(self.up(x), y)
INPUTS = {"x": torch.zeros(4, 8), "y": torch.zeros(4, 8)}
"""

FACTORIES: Mapping[str, str] = {
    "raises": "raise ValueError('no\\nsecond line')",
    "raises without text": "raise RuntimeError",
    "raises control characters": "raise ValueError('\\x1b]0;title\\x07 \\ud800')",
    "raises a long text": "raise ValueError('a' * 100_000)",
    "raises markup": "raise KeyError('[/]')",
    "raises what cannot be printed": """
    class Odd(Exception):
        def __str__(self): raise ValueError
    raise Odd""",
    "exits": "sys.exit(0)",
    "exits with 3": "sys.exit(3)",
    "exits with a text": "sys.exit('a\\nb')",
    "exits as quit": "raise SystemExit",
    "leaves a generator": "raise GeneratorExit",
    "raises a base": "raise BaseException('base')",
    "recurses": "f()",
    "out of memory": "raise MemoryError",
    "allocates": "x = bytearray(10**13)",
    "prints and raises": "print('a\\n' * 100); print('b', file=sys.stderr); raise OSError(2, 'x')",
    "returns nothing": "pass",
    "returns a model": "return Model()",
    "returns a list": "return [Model(), INPUTS]",
    "returns three": "return Model(), INPUTS, 3",
    "returns inputs first": "return INPUTS, Model()",
    "returns the class": "return Model, INPUTS",
    "inputs are a tuple": "return Model(), tuple(INPUTS.values())",
    "inputs have numbers as names": "return Model(), dict(enumerate(INPUTS.values()))",
    "inputs are missing": "return Model(), {}",
    "an input too many": "return Model(), INPUTS | {'z': 1}",
    "an input is a text": "return Model(), INPUTS | {'y': 'text'}",
    "an input is None": "return Model(), INPUTS | {'y': None}",
    "an input is a module": "return Model(), INPUTS | {'y': sys}",
    "inputs of no samples": "return Model(), {n: t[:0] for n, t in INPUTS.items()}",
    "scalar inputs": "return Model(), {n: t[0, 0] for n, t in INPUTS.items()}",
    "inputs of another shape": "return Model(), INPUTS | {'x': torch.zeros(4, 9)}",
    "integer inputs": "return Model(), INPUTS | {'x': torch.zeros(4, 8).long()}",
    "float8 parameters": "return Model().to(torch.float8_e4m3fn), INPUTS",
    "complex parameters": "return Model().to(torch.complex64), INPUTS",
    "generator": "yield 1",
    "needs an argument": "raise TypeError('f() missing 1 required positional argument')",
    "no parameters": "return nn.Identity(), {'input': torch.zeros(4)}",
    "a bare module": "return nn.Module(), INPUTS",
}
FORWARDS: Mapping[str, str] = {
    "forward raises": "raise ValueError('no')",
    "forward exits": "sys.exit(0)",
    "forward returns nothing": "pass",
    "forward returns a text": "return 'loss'",
    "forward returns no scalar": "return self.up(x)",
    "forward returns an integer": "return (x > y).sum()",
    "forward branches": "return x.sum() if x.sum() > 0 else y.sum()",
    "forward prints and raises": "print('a'); raise KeyError('x')",
    "forward recurses": "return self.forward(x, y)",
    "forward reads an item": "return self.up(x).sum() * x.sum().item()",
}
MODULES: Mapping[str, str] = {
    "no Python": "def (:",
    "NUL bytes": "a = 1\x00",
    "import raises": "raise ValueError('no')",
    "import exits": "import sys; sys.exit(0)",
    "import of nothing": "import no_such_module_at_all",
    "import of itself": "from mine import f",
    "no function": "a = 1",
    "no callable": "f = 3",
    "getattr raises": "def __getattr__(name): raise ValueError(name)",
    "getattr exits": "import sys\ndef __getattr__(name): sys.exit(0)",
    "a class": "class f: pass",
    "needs an argument": "def f(model): pass",
    "a coroutine": "async def f(): pass",
    "warns": "import warnings\nwarnings.warn('a')\ndef f(): pass",
    "closes stdout": "import os, sys\nsys.stdout = None\ndef f(): pass",
}
PLAN = ("plan", "mine:f", "-c", "local-cpux2", "-o", "out.json")
CHECK = ("check", "plan.json", "--model", "mine:f")
MAY_PASS = ("complex", "integer", "prints", "no parameters", "scalar", "samples", "bare")
"""Parts of names of models that may be planned."""


def cases() -> Iterator[Case]:
    """Every bad module, planned and held against a plan."""
    for name, body in FACTORIES.items():
        text = f"{HEAD}def f():\n    {body}\n"
        yield Case(f"factory: {name}", PLAN, _module(text), may_pass=_may_pass(name))
    for name, body in FORWARDS.items():
        at = HEAD.index("return nn.functional")
        text = f"{HEAD[:at]}{body}\n{HEAD[HEAD.index('INPUTS = ') :]}"
        text += "def f():\n    return Model(), INPUTS\n"
        yield Case(f"factory: {name}", PLAN, _module(text), may_pass=_may_pass(name))
    for name, text in MODULES.items():
        for arguments in (PLAN, CHECK):
            yield Case(f"{arguments[0]}, module: {name}", arguments, _module(text))
    for option in ("--batch=4", "--seq=4"):
        text = f"{HEAD}def f():\n    return Model(), INPUTS\n"
        yield Case(f"factory: {option}", (*PLAN, option), _module(text))


def _may_pass(name: str) -> bool:
    return any(word in name for word in MAY_PASS) and "raises" not in name


def _module(text: str) -> Maker:
    def prepare(folder: Path) -> None:
        with_plan(folder)
        (folder / "mine.py").write_text(text, encoding="utf-8")

    return prepare
