"""A checkpoint's folder damaged, crafted, and left by saves that were killed."""

import os
import pickle
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes.checkpoint import Dangerous, Run, filled, killed, rewritten, same

from meshfold.errors import MeshfoldError


@pytest.fixture(scope="module")
def run() -> Run:
    """What saves, in any state."""
    return Run.started()


@pytest.fixture(scope="module")
def other() -> Run:
    """What loads, in any state."""
    return Run.started(seed=1)


def flip(file: Path, draw: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)


def truncate(file: Path, draw: random.Random) -> None:
    os.truncate(file, draw.randrange(file.stat().st_size))


def extend(file: Path, draw: random.Random) -> None:
    with file.open("ab") as opened:
        opened.write(draw.randbytes(draw.randint(1, 20)))


def blank(file: Path, draw: random.Random) -> None:
    content = file.read_bytes()
    begin = draw.randrange(len(content) - 8)
    file.write_bytes(content[:begin] + b"\0" * 8 + content[begin + 8 :])
    flip(file, draw)


def delete(file: Path, draw: random.Random) -> None:
    file.unlink()


def link(file: Path, draw: random.Random) -> None:
    file.rename(file.parent.parent / "moved")
    file.symlink_to(file.parent.parent / "moved")


def pipe(file: Path, draw: random.Random) -> None:
    file.unlink()
    os.mkfifo(file)


def directory(file: Path, draw: random.Random) -> None:
    file.unlink()
    file.mkdir()


def swap(file: Path, draw: random.Random) -> None:
    another = draw.choice([f for f in file.parent.iterdir() if f != file])
    content = another.read_bytes()
    another.write_bytes(file.read_bytes())
    file.write_bytes(content)


def shuffle(file: Path, draw: random.Random) -> None:
    content = file.read_bytes()
    middle = draw.randrange(1, len(content))
    file.write_bytes(content[middle:] + content[:middle])


def pickled(file: Path, draw: random.Random) -> None:
    file.write_bytes(pickle.dumps(Dangerous(str(file.parent.parent / "ran"))))


def foreign(file: Path, draw: random.Random) -> None:
    names = [".metadata", "notes.txt", "meshfold-00000000-00000-of-00002.safetensors", ".nfs01"]
    (file.parent / draw.choice(names)).write_bytes(draw.randbytes(30))


DAMAGES = (flip, flip, flip, truncate, extend, blank, delete, link, pipe, directory, swap, shuffle)


@pytest.mark.parametrize("count", [60, pytest.param(300, marks=pytest.mark.slow)])
def test_no_damage_loads_silently(tmp_path: Path, run: Run, other: Run, count: int) -> None:
    """Each is refused in one line and changes nothing; only a file more loads, and loads right."""
    draw = random.Random(count)
    run.save(tmp_path / "good", {"step": 3, "rng": torch.arange(9)})
    other.optimizer.zero_grad()
    saved, before = run.contents(), other.contents()
    refused = 0
    for _ in range(count):
        shutil.rmtree(tmp_path / "case", ignore_errors=True)
        folder = shutil.copytree(tmp_path / "good", tmp_path / "case" / "last")
        damage = draw.choice((*DAMAGES, pickled, foreign))
        damage(draw.choice(sorted(folder.iterdir())), draw)
        assert not same(before, saved)
        try:
            other.load(folder)
        except MeshfoldError as error:
            refused += 1
            assert str(folder) in str(error) and "\n" not in str(error)
            assert same(other.contents(), before), damage
        else:
            assert damage is foreign
            assert same(other.contents(), saved)
            filled(other.model, other.optimizer, 5)
            before = other.contents()
    assert 0.8 * count < refused < count
    assert not (tmp_path / "case" / "ran").exists()


def places(node: Any) -> list[tuple[Any, Any]]:
    items = node.items() if isinstance(node, dict) else enumerate(node)
    inner = [(node, key) for key, _ in items]
    for container, key in list(inner):
        if isinstance(container[key], dict | list):
            inner += places(container[key])
    return inner


ODD = (None, -1, 10**15, "x", "../x", [], {}, 0.5, True, [[1]], {"tensor": "x"}, {"dict": [3]})


@pytest.mark.parametrize("count", [40, pytest.param(300, marks=pytest.mark.slow)])
def test_a_crafted_index_breaks_nothing(tmp_path: Path, run: Run, other: Run, count: int) -> None:
    """Whoever writes it with its checksums can say what is loaded, and nothing else."""
    draw = random.Random(count)
    run.save(tmp_path / "good", {"step": 3, "rng": [torch.arange(9)]})
    refused = 0
    for _ in range(count):
        folder = shutil.copytree(tmp_path / "good", tmp_path / "case")

        def change(data: Any) -> None:
            container, key = draw.choice(places(data))
            container[key] = draw.choice(ODD)

        rewritten(folder, change)
        before = other.contents()
        try:
            other.load(folder)
        except MeshfoldError as error:
            refused += 1
            assert "\n" not in str(error)
            assert same(other.contents(), before)
        else:
            run.save(tmp_path / "again")
            other.load(tmp_path / "again")
        shutil.rmtree(folder)
    assert refused > count / 2


# Saves that die.


def test_a_save_that_dies_before_any_operation_leaves_a_checkpoint(
    tmp_path: Path, run: Run, other: Run
) -> None:
    folder = tmp_path / "last"
    last, at = 0, 0
    filled(run.model, run.optimizer, 0)
    run.save(folder)
    seen = set()
    while killed(lambda: run.save(folder), folder, at=at, delay_s=0):
        other.load(folder)
        assert other.model.num_forwards in (last, at)
        seen.add(last := other.model.num_forwards)
        assert_all_is(other, last)
        at += 1
        filled(run.model, run.optimizer, at)
    assert at > 10 and len(seen) > 1
    assert [f.name for f in tmp_path.iterdir()] == ["last"]
    assert len(list(folder.iterdir())) == 3, "the next save clears up"


def test_a_first_save_that_dies_leaves_no_folder_or_a_checkpoint(
    tmp_path: Path, run: Run, other: Run
) -> None:
    filled(run.model, run.optimizer, 1)
    folder, at, seen = tmp_path / "last", 0, set()
    while killed(lambda: run.save(folder), folder, at=at, delay_s=0):
        seen.add(folder.exists())
        if folder.exists():
            other.load(folder)
            assert_all_is(other, 1)
            shutil.rmtree(folder)
        at += 1
    assert seen == {True, False}
    assert [f.name for f in tmp_path.iterdir()] == ["last"]


@pytest.mark.slow
def test_a_hundred_kills_leave_the_last_good_one(tmp_path: Path, run: Run, other: Run) -> None:
    draw, folder, last = random.Random(0), tmp_path / "last", 0
    filled(run.model, run.optimizer, 0)
    ballast = torch.zeros(1 << 21)
    start_s = time.monotonic()
    run.save(folder, ballast)
    took_s = time.monotonic() - start_s
    was_killed = 0
    for k in range(1, 101):
        filled(run.model, run.optimizer, k)
        delay_s = draw.uniform(0, took_s)
        was_killed += killed(lambda: run.save(folder, ballast), folder, at=None, delay_s=delay_s)
        other.load(folder)
        assert other.model.num_forwards in (last, k)
        last = other.model.num_forwards
        assert_all_is(other, last)
    assert was_killed


def assert_all_is(found: Run, number: int) -> None:
    for name, value in found.contents().items():
        assert not isinstance(value, torch.Tensor) or torch.all(value == number), name
