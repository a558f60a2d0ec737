"""The files of a checkpoint in their folder: written beside those before, made valid in one step.

    meshfold-ID-00000-of-00002.safetensors     the pieces that rank 0 of 2 wrote, and so on
    meshfold-ID-index.json                     the index; ID is another one in every save
    meshfold-checkpoint.sha256                 their checksums, for `sha256sum --check` too

The last file decides: it is replaced when all others are on disk, and then those of the save before
are deleted. Whenever a save dies, the folder holds a whole checkpoint: the old one or the new one.
Only files named like these are ever deleted. A new folder is made as FOLDER.partial and renamed.
"""

import errno
import hashlib
import os
import re
import stat
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import IO
from uuid import uuid4

from meshfold.errors import MeshfoldError

CHECKSUMS = "meshfold-checkpoint.sha256"
_FILE = r"meshfold-[0-9a-f]{8}-(?:index\.json|\d{5,}-of-\d{5,}\.safetensors)"
_OURS = re.compile(rf"{_FILE}|{re.escape(CHECKSUMS)}(?:\.partial)?")
_LINE = re.compile(rf"([0-9a-f]{{64}})  ({_FILE})")
_MOST_BYTES = 1 << 28
"""Of a file that is read whole: the index of a large run has a few megabytes."""
_ELSEWHERE = "save elsewhere, or move it away"
REMEDY = "load another checkpoint"


@dataclass(frozen=True)
class Target:
    """Where a save goes. working: the folder that is written in, which becomes `folder`."""

    folder: Path
    working: Path
    save_id: str

    @property
    def index_name(self) -> str:
        """Of this save's index."""
        return f"meshfold-{self.save_id}-index.json"

    def shard_name(self, rank: int, num_ranks: int) -> str:
        """Of the file that a rank writes."""
        return f"meshfold-{self.save_id}-{rank:05}-of-{num_ranks:05}.safetensors"

    def clear(self) -> None:
        """Delete what this save wrote, after it failed."""
        with suppress(OSError):
            _remove_leftovers(self.working)
        if self.working != self.folder:
            with suppress(OSError):
                self.working.rmdir()


def prepared(folder: Path) -> Target:
    """A place for a save to `folder`, cleared of what saves that died left there. Raises
    MeshfoldError, before anything is touched, where something else than a checkpoint is, and where
    no folder can be made."""
    working = working_folder(folder)
    try:
        _check_place(working)
        working.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(working)
    except OSError as error:
        raise MeshfoldError(
            f"{folder}: cannot be written ({error.strerror}); save elsewhere"
        ) from error
    return Target(folder, working, uuid4().hex[:8])


def working_folder(folder: Path) -> Path:
    """Where a save to `folder` writes: a new folder has another name until it is whole."""
    return folder if os.path.lexists(folder) else folder.with_name(f"{folder.name}.partial")


def _check_place(folder: Path) -> None:
    if folder.is_symlink():
        raise MeshfoldError(f"{folder}: a link; name the folder that it leads to")
    if not folder.exists():
        return
    if not folder.is_dir():
        raise MeshfoldError(f"{folder}: no folder; {_ELSEWHERE}")
    names = os.listdir(folder)
    if CHECKSUMS not in names:
        if foreign := sorted(name for name in names if not _OURS.fullmatch(name)):
            raise MeshfoldError(
                f"{folder}: holds {foreign[0]} and no checkpoint of this version; {_ELSEWHERE}"
            )
    elif not stat.S_ISREG((folder / CHECKSUMS).lstat().st_mode):
        raise MeshfoldError(f"{folder / CHECKSUMS}: no regular file; {_ELSEWHERE}")


def commit(target: Target, index: bytes, checksums: Mapping[str, str]) -> None:
    """Make a save valid, whose files with these sha256 are on disk, and delete the one before."""
    working = target.working
    with new_file(working / target.index_name) as file:
        file.write(index)
    listed = {**checksums, target.index_name: hashlib.sha256(index).hexdigest()}
    partial = working / f"{CHECKSUMS}.partial"
    partial.unlink(missing_ok=True)
    with new_file(partial) as file:
        file.write("".join(f"{digest}  {name}\n" for name, digest in listed.items()).encode())
    _flush_folder(working)
    os.replace(partial, working / CHECKSUMS)
    _flush_folder(working)
    if working != target.folder:
        os.rename(working, target.folder)
        _flush_folder(target.folder.parent)
    with suppress(OSError):  # the next save tries again
        _remove_ours(target.folder, {CHECKSUMS, *listed})


@contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, which is on disk at the end. Raises MeshfoldError where that fails."""
    try:
        with path.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise MeshfoldError(
            f"{path}: cannot be written ({error.strerror}); what was saved before is still there"
        ) from error


@contextmanager
def regular_file(path: Path) -> Iterator[BufferedReader]:
    """A file to read. Raises MeshfoldError where there is none, where it is no regular file (a link
    leads elsewhere, a pipe never ends), and where reading fails."""
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise MeshfoldError(f"{path}: no regular file; {REMEDY}")
            yield file
    except OSError as error:
        reason = "a link" if error.errno == errno.ELOOP else error.strerror
        raise MeshfoldError(f"{path}: cannot be read ({reason}); {REMEDY}") from error


def read_checksums(folder: Path) -> tuple[str, dict[str, str]]:
    """The name of the index, and the sha256 of every file by name. Raises MeshfoldError."""
    path = folder / CHECKSUMS
    if not os.path.lexists(path):
        is_old = (folder / ".metadata").exists()
        what = "a checkpoint with pickle, of an older version" if is_old else "no checkpoint there"
        raise MeshfoldError(f"{folder}: {what}; save_checkpoint writes one")
    lines = _read(path).decode("ascii", "replace").split("\n")
    found = [_LINE.fullmatch(line) for line in lines[:-1]]
    listed = {match[2]: match[1] for match in found if match}
    index = [name for name in listed if name.endswith("-index.json")]
    if lines[-1] or len(listed) != len(lines) - 1 or len(index) != 1:
        raise MeshfoldError(f"{path}: damaged; {REMEDY}")
    return index[0], listed


def check_file(path: Path, digest: str) -> None:
    """Raises MeshfoldError unless the file has this sha256."""
    with regular_file(path) as file:
        found = hashlib.file_digest(file, "sha256")
    if found.hexdigest() != digest:
        raise _damaged(path)


def read_checked(path: Path, digest: str) -> bytes:
    """A whole small file. Raises MeshfoldError unless it has this sha256."""
    content = _read(path)
    if hashlib.sha256(content).hexdigest() != digest:
        raise _damaged(path)
    return content


def _damaged(path: Path) -> MeshfoldError:
    return MeshfoldError(f"{path}: damaged, its sha256 is not that of {CHECKSUMS}; {REMEDY}")


def _read(path: Path) -> bytes:
    with regular_file(path) as file:
        if os.fstat(file.fileno()).st_size > _MOST_BYTES:
            raise MeshfoldError(f"{path}: larger than {_MOST_BYTES >> 20} MiB; {REMEDY}")
        return file.read(_MOST_BYTES)


def _remove_leftovers(folder: Path) -> None:
    """Delete the files of saves that did not become valid. Beside a damaged checkpoint everything
    stays until the next one is good."""
    has_checkpoint = os.path.lexists(folder / CHECKSUMS)
    with suppress(MeshfoldError):
        _remove_ours(folder, {CHECKSUMS, *read_checksums(folder)[1]} if has_checkpoint else set())


def _remove_ours(folder: Path, kept: Set[str]) -> None:
    """Delete the files of saves, but those `kept`; nothing else is touched."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if _OURS.fullmatch(entry.name) and entry.name not in kept:
                if entry.is_file(follow_symlinks=False):
                    os.unlink(entry.path)


def _flush_folder(folder: Path) -> None:
    """Have the names in a folder on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
