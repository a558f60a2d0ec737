"""Which cases of a matrix run by default; `pytest --exhaustive` runs them all.

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("family", ...)
    @pytest.mark.parametrize("strategy", ...)

Every value of every parameter is in two cases at least, where it has so many, and with three or
more parameters every two values of two of them are in one. If some are marked slow, the others are
always among them, and cases whose mark says that they take longer are taken last. The choice is the
same on every worker and in every run.

    @pytest.mark.rotated(4)
    @pytest.mark.parametrize("seed", ...)

A quarter of the slow cases runs, which one is in the commit's name: a failure is there again in the
next run of the same code, and other cases run after the next commit. A case that is named in full
on the command line always runs.

Of a run of all tests a part runs in the same way (unless `--every-turn`): half of the slow ones,
and of the others a fifth of the long ones, those of LONG_S or more by seconds.json, which `make
seconds` writes. Machines of continuous integration were seen to take twice as long as others.
"""

import json
import subprocess
import zlib
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest

from support.tables import ROOT

Case = Mapping[str, Hashable]
SECONDS = Path(__file__).parent / "seconds.json"
LONG_S, TURNS, SLOW_TURNS = 1.0, 5, 2


def unsampled(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """What is left out of samples."""
    left = set()
    for cases in _matrices(items, "sampled"):
        (times,) = cases[0].get_closest_marker("sampled").args
        values = _values(cases)
        # Equal for equal values: tests of one matrix choose the same, and share what they make.
        draws = [zlib.crc32(str(case).encode()) for case in values]
        order = sorted(range(len(cases)), key=lambda k: (seconds_of(cases[k]), draws[k]))
        cases, values = [cases[k] for k in order], [values[k] for k in order]
        quick = [k for k, item in enumerate(cases) if not item.get_closest_marker("slow")]
        chosen = sample(values, times, quick if len(quick) < len(cases) else ())
        left |= {item for k, item in enumerate(cases) if k not in chosen}
    return left


def not_their_turn(items: Sequence[pytest.Item], commit: int) -> set[pytest.Item]:
    """What other commits run. commit: its name, as a number."""
    left = set()
    for cases in _matrices(items, "rotated"):
        (parts,) = cases[0].get_closest_marker("rotated").args
        slow = [item for item in cases if item.get_closest_marker("slow")]
        # In an order without a period: a part has some of every parameter's values.
        slow.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
        left |= {item for k, item in enumerate(slow) if k % parts != commit % parts}
    return left


def is_whole_run(args: Sequence[str]) -> bool:
    """Whether the folder of all tests is run, and no part of it was asked for."""
    return [arg.rstrip("/").rpartition("/")[2] for arg in args] == ["tests"]


def in_turns(items: Sequence[pytest.Item], commit: int) -> set[pytest.Item]:
    """Slow and long tests that other commits run."""
    slow = [item for item in items if item.get_closest_marker("slow")]
    long = [i for i in items if not i.get_closest_marker("slow") and seconds_of(i) >= LONG_S]
    left = set()
    # Bits of the name that `rotated` does not look at, so that each of its parts has both turns.
    for some, turns, number in ((slow, SLOW_TURNS, commit >> 8), (long, TURNS, commit)):
        some.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
        left |= {item for k, item in enumerate(some) if k % turns != number % turns}
    return left


@cache
def measured_seconds() -> Mapping[str, float]:
    """Mean seconds of a case, by test without its parameters; of long ones only."""
    found: dict[str, float] = json.loads(SECONDS.read_text(encoding="utf-8"))
    return found


def write_seconds(measured: Mapping[str, Sequence[float]]) -> None:
    """Keep what tests took: the means of cases, in half seconds, since less is noise."""
    means = {name: round(2 * sum(s) / len(s)) / 2 for name, s in sorted(measured.items())}
    text = json.dumps({name: s for name, s in means.items() if s >= LONG_S}, indent=1)
    new = SECONDS.with_suffix(".new")
    new.write_text(text + "\n", encoding="utf-8")
    new.replace(SECONDS)


def commit_number() -> int:
    """The name of the checked out commit as a number; 0 outside a repository."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(found.stdout, 16)


def _matrices(items: Sequence[pytest.Item], mark: str) -> Iterable[list[pytest.Item]]:
    """The cases of every test with a mark."""
    found: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker(mark) and hasattr(item, "callspec"):
            found.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return found.values()


def _values(items: Sequence[pytest.Item]) -> list[dict[str, str]]:
    """By case and parameter, the value as text or, where that is an address, its number."""
    numbers: dict[int, int] = {}
    return [
        {
            name: f"{numbers.setdefault(id(value), len(numbers))}"
            if " at 0x" in (text := repr(value))
            else text
            for name, value in sorted(item.callspec.params.items())
        }
        for item in items
    ]


def seconds_of(item: pytest.Item) -> float:
    """About what a test takes, for an order alone: its mark `slow` may say it."""
    if slow := item.get_closest_marker("slow"):
        return float(slow.args[0]) if slow.args else 4.0
    return measured_seconds().get(item.nodeid.partition("[")[0], 0.1)


def sample(cases: Sequence[Case], times: int, kept: Sequence[int] = ()) -> set[int]:
    """Numbers of the cases that run, `kept` among them: always the one next that has most of what
    is still missing."""
    wanted = [wanted_of(case) for case in cases]
    missing = Counter(what for found in wanted for what in found)
    for what, count in missing.items():
        missing[what] = min(count, times if len(what) == 1 else 1)
    chosen: set[int] = set()
    turn: int | None
    for turn in kept:
        chosen.add(turn)
        missing.subtract(wanted[turn])
    while True:
        gains = [sum(missing[what] > 0 for what in found) for found in wanted]
        turn = max(
            (k for k in range(len(cases)) if k not in chosen and gains[k]),
            key=lambda k: gains[k],
            default=None,
        )
        if turn is None:
            return chosen
        chosen.add(turn)
        missing.subtract(wanted[turn])


def wanted_of(case: Case) -> list[tuple[tuple[str, Hashable], ...]]:
    """The values of a case, and, of three or more, every two of them."""
    values = sorted(case.items(), key=lambda item: item[0])
    sizes = (1, 2) if len(values) > 2 else (1,)
    return [some for size in sizes for some in combinations(values, size)]
