"""What an array of numpy holds, to compare by identity and to put back."""

from typing import Any

import numpy as np

_MOST_BYTES = 4096


def array_content(owner: Any) -> tuple[Any, ...]:
    """Its bytes, or its objects; nothing of one that is large."""
    if owner.nbytes > _MOST_BYTES:
        return ()
    return tuple(owner.flat) if owner.dtype == object else (owner.tobytes(),)


def write_array(owner: Any, content: tuple[Any, ...]) -> None:
    """Put back what `array_content` gave. Records with objects among their fields stay."""
    if owner.dtype == object:
        flat = np.empty(owner.size, object)
        for k, entry in enumerate(content):
            flat[k] = entry
        owner[...] = flat.reshape(owner.shape)
    elif content and not owner.dtype.hasobject and owner.tobytes() != content[0]:
        owner.flat[:] = np.frombuffer(content[0], owner.dtype)
