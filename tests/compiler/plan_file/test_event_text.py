"""Simulated steps in the plan file: there and back, and what is refused."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from support.programs.plans import simulated_plan

from meshfold.errors import PlanFormatError
from meshfold.plan_file.event_text import from_run_lengths, read_event, run_lengths, write_event
from meshfold.plan_file.io import plan_from_json, plan_to_json


def test_a_simulated_plan_survives_its_file() -> None:
    plan = simulated_plan()
    assert plan_from_json(plan_to_json(plan)) == plan


def test_the_file_is_folded() -> None:
    events = json.loads(plan_to_json(simulated_plan()))["events"]
    assert events["instances"] == [[0, 1], [1, 32], [2, 1]]
    assert events["regions"][1]["forward"][0] == "unshard 0 1024"


@pytest.mark.parametrize(
    "line",
    [
        "compute 0.00123 7",
        "all_gather dp,ep nvlink4-switch 33554432 0.0002 0",
        "all_gather tp a link with spaces 1 2.0 3",
        "unshard 0 5",
        "reduce 12 5",
        "forward_prefetch 0",
        "pre_backward 9",
        "backward_unshard 0",
        "backward_prefetch 3",
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
        (("simulated", "step_s"), 9.5, "simulated.step_s: the file says 9.5, the rest gives"),
        (("simulated", "hidden_share"), 0.1, "simulated.hidden_share: the file says 0.1"),
        (
            ("events", "instances"),
            [[0, 3]],
            "events: resident_bytes: 3 instances have 7",
        ),
        (("events", "instances"), [[7, 34]], "events: instances: there are 3 regions"),
        (
            ("events", "regions", 1, "forward", 0),
            "unshard 4 0",
            r"regions\[1\]: region B: unshard 4 is of none of its 1 parameter groups",
        ),
        (
            ("events", "regions", 1, "forward", 0),
            "unshard 0",
            "'unshard 0' is no event; unshard, red",
        ),
        (
            ("events", "regions", 1, "forward", 0),
            "forward_prefetch 1 0",
            "is no event; unshard, reduce, wait, produce, consume",
        ),
        (("events", "regions", 1, "forward", 0), "start x 1", "a start has a number"),
        (("events", "regions", 1, "forward", 0), "wait 2 0", "region B: wait 2 has no start"),
        (("events", "regions", 1, "forward", 0), "compute", "its last word is a number of bytes"),
        (("events", "regions", 1, "forward", 0), "compute -1.0 0", "'-1.0' are no seconds"),
        (("events", "regions", 1, "forward", 0), "gather dp 1 0", "is no collective; write 'kind"),
        (("events", "regions", 1, "forward", 0), "all_gather dp l 1 -2.0 0", "are no seconds"),
        (
            ("events", "reduce_buckets"),
            [{"collective": "all_reduce dp l 1 2.0", "groups": [[1, -1]]}],
            r"events.reduce_buckets\[0\].groups\[0\]\[1\]: input should be greater than or equal",
        ),
        (
            ("events", "reduce_buckets"),
            [{"collective": "all_reduce dp l 1 2.0", "groups": [[1, 0], [1, 0]]}],
            r"events: reduce_buckets: \(1, 0\) is there twice, or no group that does this",
        ),
        (
            ("events", "trailing"),
            ["all_gather dp"],
            r"events.trailing\[0\]: 'all_gather dp' is no coll",
        ),
    ],
)
def test_contradictions_are_refused_with_their_path(
    path: tuple[str | int, ...], line: object, message: str
) -> None:
    document = json.loads(plan_to_json(simulated_plan()))
    at: Any = document
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = line
    with pytest.raises(PlanFormatError, match=message):
        plan_from_json(json.dumps(document))
