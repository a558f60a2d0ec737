"""Cases of bad files: every command that reads one, with everything that is no such file; and
records in which one field is wrong."""

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fuzzing.arguments import NOWHERE
from fuzzing.case import Case
from fuzzing.contents import FILES, Maker
from fuzzing.plans import cluster_document, config_document, plan_document, with_plan

READERS: Mapping[str, tuple[str, ...]] = {
    "show": ("show", "bad.json"),
    "show --json": ("show", "bad.json", "--json"),
    "explain": ("explain", "bad.json"),
    "diff, first": ("diff", "bad.json", "plan.json"),
    "diff, second": ("diff", "plan.json", "bad.json"),
    "timeline": ("timeline", "bad.json"),
    "timeline --trace": ("timeline", "bad.json", "--trace", "out.json"),
    "check": ("check", "bad.json", "--model", NOWHERE, "-o", "out.json"),
    "graph": ("graph", "bad.json", "--model", NOWHERE),
    "verify": ("verify", "bad.json", "--model", NOWHERE),
    "cluster": ("plan", NOWHERE, "-c", "./bad.json", "-o", "out.json"),
    "configuration": ("plan", "bad.json", "-c", "local-cpux2", "-o", "out.json"),
    "configuration of a plan": ("verify", "plan.json", "--model", "bad.json"),
}
PLAN_READERS = tuple(
    READERS[name] for name in ("show", "explain", "diff, first", "timeline", "graph")
)
CLUSTER_READER, CONFIG_READER = READERS["cluster"], READERS["configuration"]

MISSING = object()
"""Stands for a field that is left out."""
VALUES: Mapping[str, Any] = {
    "left out": MISSING,
    "null": None,
    "true": True,
    "0": 0,
    "-1": -1,
    "10^12": 10**12,
    "10^30": 10**30,
    "10^60": 10**60,
    "1.5": 1.5,
    "1e99": 1e99,
    "1e-300": 1e-300,
    "empty string": "",
    "control": "\x1b]0;title\x07",
    "newline": "a\nmeshfold: fine",
    "markup": "[/red] [bold]",
    "digits": "²" * 3 + "9" * 5000,
    "long": "a" * 100_000,
    "list": [],
    "nested": [[[]]],
    "runs": [[0, 10**12]],
    "long run": [[0, 999_999]],
    "object": {},
    "unknown": {"\x1b[31m": [1]},
}


def odd_files() -> Iterator[Case]:
    """Every reader with everything that is no such file."""
    for reader, arguments in READERS.items():
        for name, make in FILES.items():
            yield Case(f"{reader}: {name}", arguments, _beside_a_plan(make))


def wrong_fields() -> Iterator[Case]:
    """Plan and cluster files with one field wrong, or of another right value."""
    for k, (where, change) in enumerate(changes(plan_document())):
        arguments = PLAN_READERS[k % len(PLAN_READERS)]
        yield Case(f"{arguments[0]}, plan: {where}", arguments, written(change), may_pass=True)
    for where, change in changes(cluster_document()):
        yield Case(f"cluster: {where}", CLUSTER_READER, written(change))


def wrong_configurations() -> Iterator[Case]:
    """Configuration files with one field wrong: they may be right, and then a model is built."""
    document = config_document() | {name: 0 for name in ("num_labels", "rope_theta", "auto_map")}
    for where, change in changes(document):
        yield Case(f"configuration: {where}", CONFIG_READER, written(change), may_pass=True)


def changes(document: Any) -> Iterator[tuple[str, Any]]:
    """A document with each field changed to each value, and what that was."""
    for path in paths(document):
        for name, value in VALUES.items():
            yield f"{'.'.join(map(str, path))} {name}", changed(document, path, value)


def paths(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The places in a document; of a list the first and the last."""
    inner: list[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = [(k, value[k]) for k in sorted({0, len(value) - 1}) if value]
    for key, one in inner:
        yield (*path, key)
        yield from paths(one, (*path, key))


def changed(document: Any, path: tuple[str | int, ...], value: Any) -> Any:
    """A copy with another value in one place; what is beside the path is shared."""
    new = inner = copy.copy(document)
    for key in path[:-1]:
        inner[key] = copy.copy(inner[key])
        inner = inner[key]
    if value is MISSING:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return new


def written(document: Any) -> Maker:
    """bad.json, beside a right plan."""

    def make(path: Path) -> None:
        path.write_text(json.dumps(document), encoding="utf-8")

    return _beside_a_plan(make)


def _beside_a_plan(make: Maker) -> Maker:
    def prepare(folder: Path) -> None:
        with_plan(folder)
        make(folder / "bad.json")

    return prepare
