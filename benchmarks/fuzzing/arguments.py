"""Bad arguments: every option of every command with every bad value."""

from collections.abc import Iterator

import click

from fuzzing.case import Case
from fuzzing.plans import with_plan
from meshfold.cli.main import cli
from meshfold.ir.options import PINS

NOWHERE = "no_such_module:no_such_factory"
LAST = {
    "plan": (NOWHERE, "-c", "local-cpux2", "-o", "out.json"),
    "show": ("plan.json",),
    "explain": ("plan.json",),
    "diff": ("plan.json", "plan.json"),
    "check": ("plan.json", "--model", NOWHERE),
    "graph": ("plan.json", "--model", NOWHERE),
    "verify": ("plan.json", "--model", NOWHERE),
    "timeline": ("plan.json", "--measured", "--model", NOWHERE),
    "delink": (
        *("saved", "--plan", "plan.json", "--model", NOWHERE),
        *("--shared", NOWHERE, "-o", "out.json"),
    ),
    "profile": ("-o", "out.txt"),
    "sweep": (NOWHERE, "-c", "local-cpux2", "--over", "batch=1..2"),
}
"""What each command needs besides the option in question; profile would measure for a minute under
any other name."""

VALUES = (
    *("", " ", "-", "--", "=", "x", "0", "-0", "-1", "1.5", "1e3", "1_000", "+2", " 2", "2 "),
    *("²", "٣", "²٣", "１２", "0x10", "nan", "inf", "-inf", "NaN", "None", "true", "[]", "{}"),
    *("9" * 5000, "-" + "9" * 5000, str(10**30), str(2**63), str(2**31), "9" * 18),
    *("\x1b]0;title\x07", "a\nmeshfold: fine", "\x9b31m", "\u202eabc", "a\x00b", "[/]", "[bold]x"),
    *("\udcff", "\ud800", "a" * 100_000, "%s%n", "../../..", "~", "$(id)", ";", "*", "é" * 300),
)
SIZES = ("25 MB", "25MB2", "٣GB", "1e3GB", "-1GB", "0.0GB", f"{'9' * 5000}GB", f"{10**17}TB")
PIN_VALUES = (*VALUES, *SIZES, "full", "none", "1f1b", "tp:0", "tp:²", "tp:" + "9" * 5000, "dp,dp")
CLUSTERS = (
    *("dgx-h100x0", "dgx-h100x-1", "dgx-h100x²", "dgx-h100x٣", f"dgx-h100x{10**30}"),
    *("dgx-h100x" + "9" * 5000, f"local-cpux{10**9}", "dgx-h100x2x2", "x", "x2", "/", "./", "."),
    *(
        "/dev/zero",
        "/dev/null/x",
        "a/b",
        "\x1b.json",
        "dgx-h100x1.5",
        "dgx-h100x1e3",
        "dgx-h100x 2",
    ),
)
MODELS = (
    *(":", "a:", ":a", "a:b:c", "a.b:c", ".a:b", "..:b", "a..b:c", "os:getcwd", "builtins:dict"),
    *("builtins:print", "builtins:exit", "math:pi", "\x1b:\x1b", "\ud800:f", "a\x00:f", "é:f"),
    *("torch:nothing", "sys:exit", "os:abort_not", "a b:c", ".json", "\x1b.json", "x/.json"),
)
OVERS = ("batch", "batch=", "rate=1..8", "batch=8..4", "memory=16..80", "memory=16GB..", "seq=0,1")
MORE = {
    "--cluster": CLUSTERS,
    "--model": MODELS,
    "--memory": SIZES,
    "--devices": (
        "131073",
        str(10**9),
        "8..",
        "..8",
        "8..4",
        "0..8",
        "1,2,x",
        "1..2..4",
        ",",
        "²,2",
    ),
    "--over": (*OVERS, *(f"{name}={value}" for name in ("batch", "memory") for value in VALUES)),
}


def cases() -> Iterator[Case]:
    """Every command with every bad value of everything that it takes."""
    for name, command in sorted(cli.commands.items()):
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.is_flag:
                option = max(parameter.opts, key=len)
                if option not in ("--output", "--trace", "--passes", "--csv", "--plot"):
                    for value in (*VALUES, *MORE.get(option, ())):
                        yield _case(name, option, value)
        for value in VALUES:
            yield Case(f"{name}, an unknown option {value[:20]!r}", (name, f"--{value}x"))
            if name not in ("plan", "sweep"):
                yield Case(f"{name} {value[:20]!r}", (name, value, *LAST[name][1:]), with_plan)
    for value in MODELS:
        yield Case(f"MODEL {value!r}", ("plan", value, *LAST["plan"][1:]))
    for name in (*PINS, "layout:*", "layout:[", "", "²", "\x1b", "a" * 5000):
        for value in PIN_VALUES:
            yield _case("plan", "--pin", f"{name}={value}")
    yield from (Case(f"command {v[:20]!r}", (v,)) for v in VALUES if v)


def _case(command: str, option: str, value: str) -> Case:
    name = f"{command} {option} {value[:30]!r}"
    arguments = (command, *LAST[command], f"{option}={value}")
    return Case(name, arguments, with_plan)
