"""Fields of a Hugging Face configuration file, with limits that hold before a model is built."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshfold.errors import OptionError
from meshfold.plan_file.json_input import JsonFault, read_json

MOST_REPEATED = 4096
"""Layers, experts, stages: what is made one by one."""
MOST_MODULES = 65_536
"""Layers times experts."""
MOST_LABELS = 1_000_000
MOST_NUMBER = 100_000_000
"""Of any other whole number."""

_REPEATED = re.compile(r"(layer|expert|stage|block|depth|attention_type)s?$")
_FREE = re.compile(r"theta|max_length|seed|base|max_position|n_positions")
"""In names of numbers that nothing is made of."""


@dataclass(frozen=True)
class Configuration:
    """The fields of a Hugging Face configuration. path: the file that errors name."""

    path: Path
    fields: Mapping[str, Any]


def read_configuration(path: Path) -> Configuration:
    """The configuration in a file. Raises OptionError if there is none, or beyond the limits
    (docs/limits.md)."""
    try:
        fields = read_json(path)
    except JsonFault as error:
        raise OptionError(f"{path}: {error}; correct the file") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise OptionError(
            f"{path}: model_type: missing; this is no Hugging Face configuration file"
        )
    _check_sizes(path, fields)
    return Configuration(path, fields)


def _check_sizes(path: Path, fields: Mapping[str, Any]) -> None:
    most_of = {"layer": 1, "expert": 1}
    for where, number in _numbers(fields):
        name = where.rpartition(".")[2]
        found = _REPEATED.search(name)
        most = MOST_REPEATED if found else MOST_LABELS if "label" in where else MOST_NUMBER
        if abs(number) > most and not _FREE.search(name):
            raise OptionError(
                f"{path}: {where}: {number} is more than meshfold builds ({most}); take less"
            )
        if found and found[1] in most_of:
            most_of[found[1]] = max(most_of[found[1]], number)
    if math.prod(most_of.values()) > MOST_MODULES:
        raise OptionError(
            f"{path}: {most_of['layer']} layers of {most_of['expert']} experts are more than "
            f"meshfold builds ({MOST_MODULES}); take fewer"
        )


def _numbers(value: Any, where: str = "") -> Iterator[tuple[str, int]]:
    """Every whole number with the path of its field."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _numbers(inner, f"{where}.{name}" if where else name)
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner, where)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield where, value
