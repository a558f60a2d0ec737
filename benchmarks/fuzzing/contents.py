"""Bad files: contents that are no plan, cluster or configuration, and what is no file at all."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

Maker = Callable[[Path], None]
"""Puts something where the file should be."""


def data(content: bytes) -> Maker:
    """A file of bytes."""

    def make(path: Path) -> None:
        path.write_bytes(content)

    return make


def large(num_bytes: int, content: bytes = b"") -> Maker:
    """A file of so many bytes, zeros behind its content."""

    def make(path: Path) -> None:
        path.write_bytes(content)
        os.truncate(path, num_bytes)

    return make


def link(target: str) -> Maker:
    """A symbolic link."""
    return lambda path: path.symlink_to(target)


def _unreadable(path: Path) -> None:
    path.write_text("{}")
    path.chmod(0)


DEEP = 200_000
CONTENTS: Mapping[str, bytes] = {
    "empty": b"",
    "blank": b" \n\t ",
    "word": b"plan",
    "null": b"null",
    "number": b"3",
    "string": b'"plan"',
    "list": b"[]",
    "object": b"{}",
    "list of objects": b"[{}, {}]",
    "cut off": b'{"version": 2, "model": {"na',
    "comma at the end": b'{"version": 2,}',
    "two documents": b"{}{}",
    "comments": b'{"version": 2} // two',
    "single quotes": b"{'version': 2}",
    "BOM": b'\xef\xbb\xbf{"version": 2}',
    "UTF-16": '{"version": 2}'.encode("utf-16"),
    "latin-1": b'{"version": "\xe9"}',
    "NUL": b'{"version": 2}\x00',
    "NUL inside": b'{"a\\u0000b": 2, "version": 2}',
    "raw control": b'{"version": "\x1b]0;title\x07"}',
    "escape": b'{"version": "\\u001b]0;title\\u0007", "model_type": "\\u001b[31m"}',
    "C1 control": '{"version": "\x9b31m", "model_type": "\x9b31m"}'.encode(),
    "direction": '{"version": "\u202eabc", "model_type": "\u202eabc"}'.encode(),
    "newline": b'{"version": "1\\nmeshfold: fine", "model_type": "a\\nmeshfold: fine"}',
    "lone surrogate": b'{"version": "\\ud800", "model_type": "\\udfff"}',
    "surrogate in a key": b'{"\\ud800": 1, "version": 2, "model_type": "llama"}',
    "markup": b'{"version": "[/red]", "model_type": "[/]"}',
    "key twice": b'{"version": 2, "version": 1, "model_type": "llama", "model_type": "gpt2"}',
    "NaN": b'{"version": NaN, "model_type": NaN}',
    "Infinity": b'{"version": Infinity, "model_type": "llama", "hidden_size": -Infinity}',
    "1e999": b'{"version": 1e999, "model_type": "llama", "hidden_size": 1e999}',
    "digits": b'{"version": ' + b"9" * 100_000 + b', "model_type": "llama"}',
    "5000 digits": b'{"version": ' + b"9" * 5000 + b"}",
    "digits of a fraction": b'{"version": 0.' + b"1" * 100_000 + b"}",
    "true as version": b'{"version": true, "model_type": true}',
    "long string": b'{"version": "' + b"a" * 1_000_000 + b'", "model_type": "llamalama"}',
    "long model type": b'{"version": 1, "model_type": "' + b"a" * 100_000 + b'"}',
    "deep lists": b"[" * DEEP,
    "closed deep lists": b"[" * DEEP + b"]" * DEEP,
    "deep objects": b'{"a":' * DEEP,
    "deep in a key": b'{"version": 2, "model_type": "llama", "a": ' + b"[" * 90 + b"]" * 90 + b"}",
    "brackets": b"]" * DEEP,
    "many values": b"[" + b"1," * 2_000_000 + b"1]",
    "many objects": b"[" + b"{}," * 900_000 + b"{}]",
    "many unknown keys": json.dumps(
        {"version": 1, "model_type": "llama"} | {f"k{i}": i for i in range(100_000)}
    ).encode(),
    "many backslashes": b'"' + b"\\" * 1_000_001,
}

ODD_FILES: Mapping[str, Maker] = {
    "missing": lambda path: None,
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "zeros": link("/dev/zero"),
    "null device": link("/dev/null"),
    "random device": link("/dev/urandom"),
    "terminal": link("/dev/tty"),
    "link to itself": link("bad.json"),
    "dangling link": link("nowhere.json"),
    "unreadable": _unreadable,
    "100 MB": large(100 * 2**20, b"[" * 1000),
    "10 GB": large(10 * 2**30),
    "memory of a process": link("/proc/self/mem"),
}

FILES: Mapping[str, Maker] = {name: data(c) for name, c in CONTENTS.items()} | ODD_FILES
