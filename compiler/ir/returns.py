"""What of a model's return value a program computes: the loss, and outputs that are asked for.

A path leads to a tensor in nested containers: keys, attributes and positions, joined by dots
("losses.box", "0"); "" is a bare tensor.
"""

from dataclasses import dataclass

from meshfold.errors import OptionError

Path = str | int
"""A position may be written as a number."""

ALL = "all"
"""All tensors that a model returns."""

SUM = " + "
"""Between the paths of losses that are added up."""


@dataclass(frozen=True)
class Returns:
    """loss: paths whose sum is the loss; none: it is found (meshfold.capture.trace.returned).
    outputs: paths of what is returned in the model's structure, or ALL; none: the loss is returned
    alone. sharded: whether outputs may stay shards. has_loss: else outputs alone are computed."""

    loss: tuple[str, ...] = ()
    outputs: tuple[str, ...] | str = ()
    sharded: bool = False
    has_loss: bool = True


LOSS_ALONE = Returns()


def summands_of(given: Path | tuple[Path, ...] | None) -> tuple[str, ...]:
    """The paths of a loss, of a sum each summand. Raises OptionError for what is no path."""
    return tuple(part.strip() for path in paths_of(given) for part in path.split("+"))


def paths_of(given: Path | tuple[Path, ...] | None) -> tuple[str, ...]:
    """Paths as text. Raises OptionError for what is no path."""
    if given is None:
        return ()
    found: list[str] = []
    for path in given if isinstance(given, tuple | list) else (given,):
        if isinstance(path, bool) or not isinstance(path, str | int):
            raise OptionError(
                f"{path!r} is no path into what the model returns; write a key, an attribute or a "
                "position, joined by dots: 'losses.box'"
            )
        found.append(str(path))
    return tuple(found)
