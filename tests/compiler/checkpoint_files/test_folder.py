"""Files of a checkpoint become valid in one step, and are checked when read."""

import hashlib
import os
from pathlib import Path

import pytest

from meshfold.checkpoint_files.folder import (
    CHECKSUMS,
    Target,
    check_file,
    commit,
    new_file,
    prepared,
    read_checked,
    read_checksums,
)
from meshfold.errors import MeshfoldError


def save(folder: Path, content: bytes) -> Target:
    target = prepared(folder)
    name = target.shard_name(0, 1)
    with new_file(target.working / name) as file:
        file.write(content)
    commit(target, b"index", {name: hashlib.sha256(content).hexdigest()})
    return target


def test_a_save_replaces_the_one_before(tmp_path: Path) -> None:
    save(tmp_path / "x", b"first")
    save(tmp_path / "x", b"second")
    index, digests = read_checksums(tmp_path / "x")
    assert sorted(os.listdir(tmp_path / "x")) == sorted([CHECKSUMS, *digests])
    assert read_checked(tmp_path / "x" / index, digests.pop(index)) == b"index"
    ((shard, digest),) = digests.items()
    assert (tmp_path / "x" / shard).read_bytes() == b"second"
    check_file(tmp_path / "x" / shard, digest)
    with pytest.raises(MeshfoldError, match=f"{shard}: damaged, its sha256 is not that of"):
        check_file(tmp_path / "x" / shard, "0" * 64)


def test_what_a_save_left_that_died_is_cleared(tmp_path: Path) -> None:
    target = prepared(tmp_path / "x")
    (target.working / target.shard_name(0, 1)).write_bytes(b"part")
    (target.working / f"{CHECKSUMS}.partial").write_bytes(b"part")
    save(tmp_path / "x", b"whole")
    assert os.listdir(tmp_path) == ["x"]
    died = prepared(tmp_path / "x")
    (died.working / died.index_name).write_bytes(b"part")
    died.clear()
    assert len(os.listdir(tmp_path / "x")) == 3


def test_where_no_folder_can_be_made_a_line_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(MeshfoldError, match=r"file/x: cannot be written \(Not a directory\); save"):
        prepared(tmp_path / "file" / "x")


def test_no_file_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("mine")
    with pytest.raises(MeshfoldError, match="x: cannot be written .File exists.; what was saved"):
        with new_file(tmp_path / "x"):
            pass


@pytest.mark.parametrize("text", ["", "x\n", "0" * 64 + "  ../x\n", "0" * 64 + "  index.json\n"])
def test_checksums_of_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / CHECKSUMS).write_text(text)
    with pytest.raises(MeshfoldError, match=f"{CHECKSUMS}: damaged; load another checkpoint"):
        read_checksums(tmp_path)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / CHECKSUMS).open("wb") as file:
        file.truncate(1 << 29)
    with pytest.raises(MeshfoldError, match="larger than 256 MiB; load another checkpoint"):
        read_checksums(tmp_path)
