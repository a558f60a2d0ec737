"""Measured collectives: read, predicted, and summed up."""

import json
from dataclasses import replace
from pathlib import Path

import click
import collectives
import pytest
from click.testing import CliRunner
from published.measured_collectives import DEFAULT, Curve, errors_of, read_curves, summary_of

CURVES = read_curves(DEFAULT)


def test_all_curves_that_come_along_have_a_preset() -> None:
    assert len(CURVES) == 64
    assert all(errors_of(curve).errors for curve in CURVES)


def test_the_mean_error_is_what_it_was() -> None:
    """A change of the formulas that makes it worse has to say so here."""
    count, mean, worst = summary_of([errors_of(curve) for curve in CURVES])
    assert count == 59
    assert mean < 0.048 and abs(worst) < 0.45


def test_an_error_by_hand() -> None:
    # 8 MI300X: 312.9 GB/s, 14 hops of 1.9 us and a start of 17 us: 6.8634 ms for 1.2272e9 bytes
    num_bytes = 1.2272e9
    seconds = 17e-6 + 14 * 1.9e-6 + 1.75 * num_bytes / 312.9e9
    curve = Curve("by hand", "all_reduce", "mi300x", 1, 8, ((num_bytes, seconds / 2),), "test")
    assert errors_of(curve).errors == (pytest.approx(1.0),)
    assert summary_of([errors_of(curve), errors_of(replace(curve, left_out="odd"))])[0] == 1
    assert errors_of(replace(curve, cluster="none")).errors == ()


def test_a_ring_is_its_two_halves_with_one_start() -> None:
    ring = Curve("by hand", "all_reduce", "dgx-h100", 1, 8, ((8e9, 1.0),), "test", algorithm="ring")
    # A message of 1e9 bytes, 893952 to ramp up, 370 GB/s
    expected_s = 17e-6 + 14 * 1.9e-6 + 14e9 / 370e9 * (1 + (893952 / 1e9) ** 0.5)
    assert errors_of(ring).errors[0] + 1 == pytest.approx(expected_s)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "curves.json"
    path.write_text(json.dumps({"rows": [{"label": "no more"}]}))
    with pytest.raises(click.ClickException, match="no curves"):
        read_curves(path)


def test_the_table_ends_with_a_summary() -> None:
    result = CliRunner().invoke(collectives.main, ["--points"])
    assert result.exit_code == 0
    assert result.output.splitlines()[-1].startswith("summary: 59 of 64 curves, mean error ")
    assert "a bad setup" in result.output and "1024 MiB" not in result.output
