"""Files that commands write: regular ones only, whole or not at all, and never an input."""

import contextlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from meshfold.errors import OptionError


def output_target(path: Path, inputs: Iterable[Path] = ()) -> Path:
    """The regular file, there or not, that writing to `path` makes: links are followed. inputs:
    files that the same command reads. Raises OptionError if it may not be written."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        found = None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", error)
        raise OptionError(f"{path}: cannot be written ({reason}); name another file") from error
    if found is not None and stat.S_ISDIR(found.st_mode):
        raise OptionError(f"{path}: is a folder; name a file")
    if found is not None and not stat.S_ISREG(found.st_mode):
        raise OptionError(f"{path}: is a device, pipe or socket; name a regular file")
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    if not target.parent.is_dir():
        raise OptionError(f"{path}: no folder {target.parent}; make it first")
    if not os.access(target.parent, os.W_OK | os.X_OK) or (found and not os.access(path, os.W_OK)):
        raise OptionError(f"{path}: may not be written by this user; name another file")
    if found is not None and any(_is_same(found, one) for one in inputs):
        raise OptionError(f"{path}: is an input of this command; name another file")
    return target


def _is_same(found: os.stat_result, path: Path) -> bool:
    try:
        return os.path.samestat(found, os.stat(path))
    except (OSError, ValueError):
        return False


def write_whole(path: Path, text: str) -> None:
    """Writes a file of text: whole or not at all; one that is there keeps its mode. Raises
    OptionError for what is no regular file, OSError with the path."""
    target = output_target(path)
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
    temporary = target.with_name(f".meshfold-{os.urandom(8).hex()}")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            with open(handle, "w", encoding="utf-8", newline="\n") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(handle)
                if mode is not None:
                    os.fchmod(handle, mode)
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(error.errno, reason, str(path)) from error
