"""benchmarks/pinning: what is drawn, what is kept, and what is told of it."""

import math
from pathlib import Path

import pytest
from pinning.draws import drawn_pins, neighbour_pins
from pinning.race import Planned, Results, faster_pins, race_pins, tell
from pinning.setups import SETUPS, PinSetup

from meshfold.errors import OptionError
from meshfold.ir.options import CompileOptions

DEGREES = ("dp", "ep", "cp", "tp", "pp")
CHOSEN = {"dp": 4, "ep": 1, "cp": 1, "tp": 4, "pp": 2, "sp": 1, "microbatches": 4}


def planned(number: int, step_s: float | None) -> Planned:
    return Planned("setup", number, {"dp": number}, step_s=step_s)


@pytest.mark.parametrize("mode", ["eager", "scheduled"])
def test_pins_are_pins_and_degrees_make_the_devices(mode: str) -> None:
    wholes = 0
    for seed in range(200):
        pins = drawn_pins(seed, 32, 64, is_moe=True, mode=mode)  # type: ignore[arg-type]
        assert CompileOptions(pins=pins, mode=mode).pins == pins  # type: ignore[arg-type]
        if all(name in pins for name in DEGREES):
            wholes += 1
            assert math.prod(int(pins[name]) for name in DEGREES) == 32
    assert wholes > 50
    assert drawn_pins(3, 32, 64, is_moe=True, mode="eager") == drawn_pins(
        3, 32, 64, is_moe=True, mode="eager"
    )


def test_neighbours_differ_and_make_the_devices() -> None:
    found = [neighbour_pins(seed, CHOSEN, batch=64, is_moe=False) for seed in range(100)]
    for pins in found:
        assert math.prod(int(pins[name]) for name in DEGREES) == 32
        assert 64 // int(pins["dp"]) % int(pins["microbatches"]) == 0
        assert int(pins["sp"]) <= int(pins["tp"]) - 1
    assert len({tuple(sorted(pins.items())) for pins in found}) > 30


def test_only_what_gains_enough_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    found = [planned(-1, 1.0), planned(1, 0.999), planned(2, 0.9), planned(3, None)]
    assert [p.number for _, p in faster_pins(found)] == [2]
    assert tell("setup", found) == 1
    assert "10.0 % faster, draw 2" in capsys.readouterr().out


def test_a_pin_that_fits_beats_a_search_that_finds_nothing() -> None:
    assert [p.number for _, p in faster_pins([planned(-1, None), planned(1, 9.0)])] == [1]


def test_what_was_planned_is_not_planned_again(tmp_path: Path) -> None:
    path = tmp_path / "plans.jsonl"
    first = Results(path).get("setup", 1, lambda: planned(1, 2.0))

    def fail() -> Planned:
        raise OptionError("planned again")

    assert Results(path).get("setup", 1, fail) == first
    with pytest.raises(OptionError, match="planned again"):
        Results(path).get("setup", 2, fail)


def test_setups_are_twelve_and_some_scheduled() -> None:
    eager = [s for s in SETUPS if s.mode == "eager" and s.memory_bytes is None]
    assert len({s.model for s in eager}) == 6
    assert len(eager) == 12
    assert any(s.mode == "scheduled" for s in SETUPS)


def test_in_little_memory_what_leaves_the_device_is_drawn() -> None:
    tight = [s for s in SETUPS if s.memory_bytes is not None]
    assert len({s.name for s in SETUPS}) == len(SETUPS) and len(tight) == 4
    draws = [
        drawn_pins(seed, 8, 64, is_moe=False, mode="eager", is_tight=True) for seed in range(60)
    ]
    for name in ("offload", "recompute"):
        assert len({pins[name] for pins in draws if name in pins}) > 3
    assert all("offload" not in drawn_pins(k, 8, 64, is_moe=False, mode="eager") for k in range(60))


def test_a_tiny_setup_is_raced() -> None:
    setup = PinSetup("llama-tiny", "local-cpux2", 2, 16)
    free, *pinned = race_pins(setup, 1, Results(None))
    assert free.step_s is not None
    assert sum(p.step_s is not None for p in pinned) >= 1
    assert not list(faster_pins([free, *pinned]))
