"""Samples of matrices of cases: what every value of a parameter meets."""

import json
from collections import Counter
from itertools import combinations, product
from pathlib import Path

import pytest
from support import sampling
from support.sampling import (
    LONG_S,
    SLOW_TURNS,
    TURNS,
    Case,
    in_turns,
    is_whole_run,
    measured_seconds,
    not_their_turn,
    sample,
    write_seconds,
)
from support.tables import ROOT

pytest_plugins = ["pytester"]
SIZES = {"family": 6, "pins": 13, "mode": 2, "parts": 3}


def matrix(*names: str) -> list[Case]:
    values = [[f"{name} {k}" for k in range(SIZES[name])] for name in names]
    return [dict(zip(names, row, strict=True)) for row in product(*values)]


@pytest.mark.parametrize("times", [1, 2, 3])
def test_of_two_parameters_every_value_is_there_as_often_as_asked(times: int) -> None:
    cases = matrix("family", "pins")
    chosen = [cases[k] for k in sample(cases, times)]
    counts = Counter(value for case in chosen for value in case.items())
    assert len(counts) == 19 and min(counts.values()) >= times
    assert 13 * times <= len(chosen) <= 13 * times + 3


def test_of_more_parameters_every_two_values_meet() -> None:
    cases = matrix("family", "pins", "mode", "parts")
    chosen = [cases[k] for k in sample(cases, 2)]
    pairs = {pair for case in chosen for pair in combinations(sorted(case.items()), 2)}
    assert pairs == {pair for case in cases for pair in combinations(sorted(case.items()), 2)}
    assert len(chosen) < len(cases) / 4


def test_what_is_kept_counts_and_what_is_rare_is_taken_whole() -> None:
    cases = [{"family": "a", "pins": 1}, {"family": "a", "pins": 2}, {"family": "b", "pins": 2}]
    assert sample(cases, 2, kept=[1]) == {0, 1, 2}
    assert sample(cases, 1, kept=[1]) == {0, 1, 2}
    assert sample(cases, 1, kept=[0, 2]) == {0, 2}
    assert sample(cases[:1], 3) == {0}


DRAWS = """
import pytest

SLOW = [pytest.param(k, marks=pytest.mark.slow) for k in range(1, 8)]

@pytest.mark.rotated(3)
@pytest.mark.parametrize("draw", [0, *SLOW])
def test_draw(draw): pass

def test_other(): pass
"""


def test_draws_take_turns(pytester: pytest.Pytester) -> None:
    """What is quick, or no draw, is in every turn, and every slow draw in one of three."""
    pytester.makeini("[pytest]\nmarkers =\n slow\n rotated")
    items = pytester.getitems(DRAWS)
    turns = [{i.name for i in items} - {i.name for i in not_their_turn(items, k)} for k in range(3)]
    always = {"test_draw[0]", "test_other"}
    assert set.intersection(*turns) == always
    assert Counter(name for turn in turns for name in turn - always) == {
        f"test_draw[{k}]": 1 for k in range(1, 8)
    }
    assert {len(turn) for turn in turns} == {4, 5}


def test_without_a_repository_it_is_the_first_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "ROOT", tmp_path)
    assert sampling.commit_number() == 0


def test_long_tests_take_turns(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytester.makeini("[pytest]\nmarkers =\n slow\n rotated")
    items = pytester.getitems(DRAWS)
    monkeypatch.setattr(
        sampling, "seconds_of", lambda item: LONG_S if "test_draw" in item.nodeid else 0.1
    )
    quick = {i.name for i in items if not i.get_closest_marker("slow")}
    turns = [quick - {i.name for i in in_turns(items, k)} for k in range(TURNS)]
    assert set.intersection(*turns) == {"test_other"}
    assert set.union(*turns) == quick


def test_slow_tests_take_turns(pytester: pytest.Pytester) -> None:
    """Those that are rotated, too: every one is in some commit's run."""
    pytester.makeini("[pytest]\nmarkers =\n slow\n rotated")
    items = pytester.getitems(DRAWS)
    slow = {i for i in items if i.get_closest_marker("slow")}
    runs = []
    for commit in range(3 * SLOW_TURNS * 256):
        turn = set(items) - not_their_turn(items, commit)
        runs.append(slow & turn - in_turns(sorted(turn, key=items.index), commit))
    assert set.union(*runs) == slow
    assert {len(run) for run in runs} == {1, 2}


@pytest.mark.parametrize(
    ("args", "is_whole"),
    [(["tests"], True), (["/at/tests/"], True), (["tests/repo"], False), (["tests", "x"], False)],
)
def test_what_is_asked_for_runs_in_full(args: list[str], is_whole: bool) -> None:
    assert is_whole_run(args) == is_whole


def test_seconds_are_means_of_long_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "SECONDS", tmp_path / "seconds.json")
    write_seconds({"b": [1.0, 3.1], "a": [1.4], "c": [0.7, 0.6], "d": [9.9]})
    assert json.loads((tmp_path / "seconds.json").read_text()) == {"a": 1.5, "b": 2.0, "d": 10.0}
    assert [path.name for path in tmp_path.iterdir()] == ["seconds.json"]


def test_measured_tests_are_there() -> None:
    """One that was renamed is to be measured again."""
    gone = [
        name
        for name in measured_seconds()
        if f"def {name.rpartition('::')[2]}(" not in _text(ROOT / name.partition("::")[0])
    ]
    assert not gone, f"not there any more: {gone}; run make seconds"


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""
