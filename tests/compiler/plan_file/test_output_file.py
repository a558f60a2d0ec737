"""Files to write: regular ones, whole or not at all, links followed, never an input."""

import errno
import os
import stat
from pathlib import Path

import pytest

from meshfold.errors import OptionError
from meshfold.plan_file import output_file
from meshfold.plan_file.output_file import output_target, write_whole


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (".", "is a folder; name a file"),
        ("", "is a folder; name a file"),
        ("/dev/null", "is a device, pipe or socket; name a regular file"),
        ("pipe", "is a device, pipe or socket"),
        ("to_null", "is a device, pipe or socket"),
        ("none/a.json", "no folder none; make it first"),
        ("into_none", "no folder "),
        ("itself", "cannot be written (Too many levels of symbolic links); name another"),
        ("a" * 300, "cannot be written (File name too long); name another file"),
        ("a\x00b", "cannot be written (embedded null byte); name another file"),
        ("input.json", "is an input of this command; name another file"),
        ("to_input", "is an input of this command"),
        ("second_name", "is an input of this command"),
    ],
)
def test_what_is_refused(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("input.json").write_text("input")
    os.link("input.json", "second_name")
    links = {"to_null": "/dev/null", "into_none": "none/a", "itself": "itself"}
    for link, target in (links | {"to_input": "input.json"}).items():
        Path(link).symlink_to(target)
    with pytest.raises(OptionError) as caught:
        output_target(Path(name), [Path("input.json"), Path("missing.json")])
    # The words of Python 3.12 and later, and those of before.
    said = str(caught.value).replace("stat: embedded null character in path", "embedded null byte")
    assert message in said
    assert "\n" not in said


def test_links_are_followed_and_modes_are_kept(tmp_path: Path) -> None:
    file, link, dangling = (tmp_path / name for name in ("file", "link", "dangling"))
    file.write_text("old")
    file.chmod(0o600)
    link.symlink_to("file")
    dangling.symlink_to("new")
    write_whole(link, "text")
    write_whole(dangling, "text")
    assert link.is_symlink() and dangling.is_symlink()
    assert file.read_text() == (tmp_path / "new").read_text() == "text"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(output_file.os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        write_whole(path, "new")
    assert caught.value.filename == str(path)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"plan.json": "old"}
