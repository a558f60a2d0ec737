"""Simulated steps in the plan file: there and back, and what is refused."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from support_plans import simulated_plan

from meshfold.errors import PlanFormatError
from meshfold.ir.step_events import from_run_lengths, read_event, run_lengths, write_event
from meshfold.plan_file.io import plan_from_json, plan_to_json


def test_a_simulated_plan_survives_its_file() -> None:
    plan = simulated_plan()
    assert plan_from_json(plan_to_json(plan)) == plan


def test_the_file_is_folded() -> None:
    events = json.loads(plan_to_json(simulated_plan()))["simulation"]["events"]
    assert events["instances"] == [[0, 1], [1, 32], [2, 1]]
    assert events["regions"][1]["forward"][0] == "open 0 1024"


@pytest.mark.parametrize(
    "line",
    [
        "compute 0.00123 7",
        "all_gather dp,ep nvlink4-switch 33554432 0.0002 0",
        "all_gather tp a link with spaces 1 2.0 3",
        "open 0 5",
        "reduce 12 5",
        "ahead 0",
        "arrive 9",
        "settle 0",
        "before 3",
        "wait 2 8",
        "start 2 all_gather dp,ep nvlink4-switch 33554432 0.0002 0",
    ],
)
def test_events_survive_their_lines(line: str) -> None:
    assert write_event(read_event(line)) == line


def test_run_lengths() -> None:
    assert run_lengths((3, 3, 1, 3)) == ((3, 2), (1, 1), (3, 1))
    assert from_run_lengths(run_lengths((3, 3, 1, 3))) == (3, 3, 1, 3)


Edit = Callable[[dict[str, Any]], None]


@pytest.mark.parametrize(
    ("path", "line", "message"),
    [
        (("step_s",), 9.5, "simulation.step_s: the file says 9.5, its parts give"),
        (("hidden_share",), 0.1, "simulation.hidden_share: the file says 0.1"),
        (("events", "instances"), [[0, 3]], "simulation.events: held_bytes: 3 instances have 7"),
        (("events", "instances"), [[7, 34]], "simulation.events: instances: there are 3 regions"),
        (
            ("events", "regions", 1, "forward", 0),
            "open 4 0",
            r"regions\[1\].forward\[0\]: 'open 4 0': the region has 1 buckets",
        ),
        (
            ("events", "regions", 1, "forward", 0),
            "open 0",
            "'open 0' is no event; open, red",
        ),
        (
            ("events", "regions", 1, "forward", 0),
            "ahead 1 0",
            "is no event; open, reduce, wait, give, take",
        ),
        (("events", "regions", 1, "forward", 0), "start x 1", "a start has a number"),
        (("events", "regions", 1, "forward", 0), "wait 2 0", "region B: wait 2 has no start"),
        (("events", "regions", 1, "forward", 0), "compute", "its last word is a number of bytes"),
        (("events", "regions", 1, "forward", 0), "compute -1.0 0", "seconds are 0 or more"),
        (("events", "regions", 1, "forward", 0), "gather dp 1 0", "is no collective; write 'kind"),
        (("events", "regions", 1, "forward", 0), "all_gather dp l 1 -2.0 0", "0 or more"),
        (
            ("events", "merged"),
            [{"collective": "all_reduce dp l 1 2.0", "places": "1.0 x"}],
            r"events.merged\[0\].places: '1.0 x': write instance.bucket, as '7.0 6.0'",
        ),
        (
            ("events", "merged"),
            [{"collective": "all_reduce dp l 1 2.0", "places": "1.0 1.0"}],
            r"events: merged: \(1, 0\) is twice there, or no bucket that does this",
        ),
        (("events", "late"), ["all_gather dp"], r"events.late\[0\]: 'all_gather dp' is no coll"),
    ],
)
def test_contradictions_are_refused_with_their_path(
    path: tuple[str | int, ...], line: object, message: str
) -> None:
    document = json.loads(plan_to_json(simulated_plan()))
    at: Any = document["simulation"]
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = line
    with pytest.raises(PlanFormatError, match=message):
        plan_from_json(json.dumps(document))
