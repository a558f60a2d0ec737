"""The command `profile`: files it writes, going on, and failures in one line."""

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.programs.profiles import example_profile

from meshfold.cli import profile_command
from meshfold.cli.main import run
from meshfold.cost_models.calibration.points import Profile
from meshfold.cost_models.calibration.points_file import load_profile, save_profile
from meshfold.plan_file.cluster_file import load_cluster
from meshfold.plan_file.io import load_plan

Measure = Callable[..., Profile]


@pytest.fixture
def measures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Measure], None]:
    """Takes what stands for the measuring of local processes."""
    monkeypatch.chdir(tmp_path)

    def use(measure: Measure, **more: Any) -> None:
        parts = {
            "profile_local": measure,
            "in_job": lambda: False,
            "is_first": lambda: True,
            "device_type": lambda: "cpu",
            "default_processes": lambda: 2,
            "DEFAULT_MINUTES": {"cpu": 1.0},
        }
        running = SimpleNamespace(**parts | more)

        def import_module(name: str) -> Any:
            is_running = name == "meshfold.profiling.processes"
            return running if is_running else importlib.import_module(name)

        replaced = SimpleNamespace(import_module=import_module)
        monkeypatch.setattr(profile_command, "importlib", replaced)

    return use


def test_cluster_and_points_are_written(
    measures: Callable[[Measure], None], capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[object] = []

    def measure(count: int, minutes: float, known: Profile | None, tell: Any) -> Profile:
        given.extend((count, minutes, known))
        tell(example_profile(finished=False), 12)
        return example_profile()

    measures(measure)
    assert run(["profile", "-o", "mine.json"]) == 0
    assert given == [2, 1.0, None]
    assert load_profile(Path("mine.points.json")) == example_profile()
    cluster = load_cluster(Path("mine.json"))
    assert (cluster.name, cluster.num_devices) == ("mine", 2)
    assert "2 processes on nodes of 2 cores" in cluster.groups[0].device.source
    out = capsys.readouterr().out
    assert "written to mine.json; 'meshfold plan MODEL --cluster mine.json" in out
    assert run(["profile", "-o", "mine.json", "--json", "--processes", "4", "--minutes", "2"]) == 0
    assert capsys.readouterr().out == Path("mine.json").read_text()
    assert given[3:] == [4, 2.0, None]  # a finished profile begins anew


def test_interrupted_it_keeps_what_it_has_and_goes_on(
    measures: Callable[[Measure], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: int, __: float, ___: Profile | None, tell: Any) -> Profile:
        tell(example_profile(finished=False), 12)
        raise KeyboardInterrupt

    measures(interrupted)
    assert run(["profile", "-o", "mine.json"]) == 130
    error = capsys.readouterr().err
    assert error == (
        "meshfold profile: interrupted; 10 of 12 points are in mine.points.json, and the same "
        "command goes on\n"
    )
    assert not Path("mine.json").exists()
    known = example_profile(finished=False)
    assert load_profile(Path("mine.points.json")) == known

    def measure(_: int, __: float, given: Profile | None, tell: Any) -> Profile:
        assert given == known
        return example_profile()

    measures(measure)
    assert run(["profile", "-o", "mine.json"]) == 0


def test_interrupted_before_the_first_point(
    measures: Callable[[Measure], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> Profile:
        raise KeyboardInterrupt

    measures(interrupted)
    assert run(["profile", "-o", "mine.json"]) == 130
    assert capsys.readouterr().err == "meshfold profile: interrupted\n"
    assert not Path("mine.points.json").exists()


def test_time_was_over(
    measures: Callable[[Measure], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(_: int, __: float, ___: Profile | None, tell: Any) -> Profile:
        tell(example_profile(finished=False), 12)
        return example_profile(finished=False)

    measures(measure)
    assert run(["profile", "-o", "mine.json"]) == 0
    assert "10 of 12 points were measured; the same command goes on" in capsys.readouterr().out


def test_too_little_is_one_line_and_kept(
    measures: Callable[[Measure], None], capsys: pytest.CaptureFixture[str]
) -> None:
    little = replace(example_profile(finished=False), kernels={})
    measures(lambda *_: little)
    assert run(["profile", "-o", "mine.json"]) == 2
    assert "too little was measured" in capsys.readouterr().err
    assert not Path("mine.json").exists() and load_profile(Path("mine.points.json")) == little


def test_only_the_first_rank_of_a_job_writes(
    measures: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    job = {"in_job": lambda: True, "profile_job": lambda *_: example_profile()}
    measures(lambda *_: example_profile(), is_first=lambda: False, **job)
    assert run(["profile", "-o", "mine.json"]) == 0
    assert not Path("mine.json").exists() and capsys.readouterr().out == ""
    assert run(["profile", "-o", "mine.json", "--processes", "2"]) == 2
    assert "the processes of this job are torchrun's" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing option '--output'"),
        (["-o", "mine.txt"], "-o mine.txt: a cluster file ends in .json"),
        (["-o", "no/mine.json"], "no folder no; make it first"),
        (["-o", "mine.json", "--minutes", "11"], "11.0 is not in the range"),
        (["-o", "mine.json", "--minutes", "0"], "0.0 is not in the range"),
        (["-o", "mine.json", "--processes", "x"], "'x' is not a valid integer"),
        (["-o", "old.json"], "old.points.json: version"),
    ],
)
def test_a_failure_is_one_line(
    measures: Callable[[Measure], None],
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_profile(example_profile(), Path("old.points.json"))
    text = Path("old.points.json").read_text()
    Path("old.points.json").write_text(text.replace('"version": 2', '"version": 7'))
    measures(lambda *_: example_profile())
    assert run(["profile", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert sorted(p.name for p in Path().iterdir()) == ["old.points.json"]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured for real, planned with; what there was no time for is measured the next time."""
    monkeypatch.chdir(tmp_path)
    arguments = ["profile", "-o", "mine.json", "--processes", "2", "--minutes"]
    assert run([*arguments, "0.3"]) in (0, 2)
    before = load_profile(Path("mine.points.json"))
    assert run([*arguments, "1"]) == 0
    after = load_profile(Path("mine.points.json"))
    assert before.finished or after.num_points > before.num_points
    assert before.finished or set(before.kernels) <= set(after.kernels)
    cluster = load_cluster(Path("mine.json"))
    assert cluster.num_devices == 2
    config = Path(__file__).parents[3] / "examples" / "configs" / "llama-tiny.json"
    assert run(["plan", str(config), "-c", "mine.json", "-o", "plan.json"]) == 0
    assert load_plan("plan.json").cluster == cluster
