"""The page of a profile."""

import pytest
from support.programs.profiles import example_profile

from meshfold.cost_models.calibration.fitted_cluster import fitted
from meshfold.report.profile import profile_view
from meshfold.report.terminal import print_view


def test_figures_and_errors(capsys: pytest.CaptureFixture[str]) -> None:
    profile = example_profile()
    print_view(profile_view(profile, fitted(profile, "mine", "a test")))
    out = capsys.readouterr().out
    assert "1 x 2 cpu-process" in out and "2 cores, gloo" in out
    assert "float64" in out and "attention" in out and "all_gather" in out
    assert "overlap" in out and "1.50" in out
    assert "network" not in out


def test_the_network_is_there_where_it_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    profile = example_profile(num_nodes=2)
    print_view(profile_view(profile, fitted(profile, "mine", "a test")))
    out = capsys.readouterr().out
    assert "network" in out and "\n  link" not in out
