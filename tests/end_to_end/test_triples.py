"""Random (model, cluster, options) triples: planned and right, or refused. benchmarks/triples.py
draws more of them."""

from dataclasses import replace

import pytest
from support.processes.pool import Pools
from support.search.triples import DRAWN_BLOCKS, compared, draw_triple, outcome_of

from meshfold.ir.options import CompileOptions

QUICK = 6
LAST, ALIKE = 54, 6
"""Draws before LAST run, as many in one test."""
BUFFERS, MASKS, ONE_KEY_HEAD = 5001, 5043, 5100
"""Triples that found a buffer updated by a layer on tp, masks beside parts, and one key head
repeated for more query heads than there are ranks."""


def check(seed: int, pools: Pools, *, scheduled: bool = False) -> None:
    outcome = outcome_of(draw_triple(seed), pools, scheduled=scheduled)
    assert not outcome.failed, f"{outcome.text}\n{outcome.failed}"


@pytest.mark.multiprocess
@pytest.mark.parametrize("seed", range(QUICK))
def test_what_is_planned_runs_and_is_right(seed: int, pools: Pools) -> None:
    check(seed, pools)


@pytest.mark.multiprocess
@pytest.mark.slow(12)
@pytest.mark.rotated(4)
@pytest.mark.parametrize("first", range(QUICK, LAST, ALIKE))
def test_more_of_what_is_planned_runs_and_is_right(first: int, pools: Pools) -> None:
    for seed in range(first, first + ALIKE):
        check(seed, pools)


@pytest.mark.multiprocess
@pytest.mark.parametrize("seed", range(DRAWN_BLOCKS, DRAWN_BLOCKS + QUICK // 2))
def test_blocks_and_returns_of_all_kinds_run_and_are_right(seed: int, pools: Pools) -> None:
    check(seed, pools)


@pytest.mark.multiprocess
@pytest.mark.slow(20)
@pytest.mark.rotated(4)
@pytest.mark.parametrize("first", range(DRAWN_BLOCKS + QUICK, DRAWN_BLOCKS + LAST, ALIKE))
def test_more_blocks_and_returns_run_and_are_right(first: int, pools: Pools) -> None:
    """In one mode, and every second scheduled in parts as well."""
    for seed in range(first, first + ALIKE):
        check(seed, pools)
        if seed % 2:
            check(seed, pools, scheduled=True)


@pytest.mark.multiprocess
@pytest.mark.parametrize("seed", [BUFFERS, MASKS, ONE_KEY_HEAD])
def test_scheduled_in_parts_it_is_right(seed: int, pools: Pools) -> None:
    check(seed, pools, scheduled=True)


@pytest.mark.multiprocess
@pytest.mark.slow(12)
@pytest.mark.rotated(4)
@pytest.mark.parametrize("first", range(QUICK, LAST, ALIKE))
def test_more_of_it_scheduled_in_parts_is_right(first: int, pools: Pools) -> None:
    for seed in range(first, first + ALIKE):
        check(seed, pools, scheduled=True)


def test_one_seed_is_one_triple() -> None:
    first, second = draw_triple(3), draw_triple(3)
    assert first.text == second.text
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert a.equal(b)


@pytest.mark.multiprocess
def test_a_refusal_is_no_failure_and_keeps_its_message(pools: Pools) -> None:
    triple = replace(draw_triple(3), options=CompileOptions(memory_bytes=1))
    outcome = outcome_of(triple, pools)
    assert "nothing fits" in outcome.refused
    assert not outcome.failed


@pytest.mark.parametrize("wrong", [2e-10, float("nan")])
def test_a_wrong_number_is_a_failure(wrong: float) -> None:
    right = {"loss": 1e-16, "weight": 3e-15}
    assert not compared("", [right, right], ()).failed
    assert compared("", [right, right | {"weight": wrong}], ()).failed.startswith("weight differs")
