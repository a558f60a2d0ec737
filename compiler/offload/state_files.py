"""Optimizer states in files instead of the host's memory.

A state is a tensor whose memory is a file (mmap): the optimizer reads and writes it as any other,
and the system keeps in memory what it has room for. Files have no name once they are open: nothing
is left behind, however a process ends. (Nie et al. 2023, arXiv:2303.02868, keep the cold pages of
a model on SSDs.)
"""

import os
import tempfile
import weakref
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from meshfold.errors import MeshfoldError, OptionError

LEAST_BYTES = 1 << 16
"""Of a state in a file. Smaller ones, the step's counters among them, stay in memory."""


def keep_states_on_disk(optimizer: Optimizer, folder: str | Path) -> None:
    """From here on the states of parameters that are in the host's memory are kept in files in
    `folder`, which exists, one per state; they are as large as the states. What the optimizer has
    so far, and what is loaded into it later, moves there.

    Training is bitwise what it is without. Raises OptionError where no file can be made, and
    MeshfoldError from a step for whose states there is no room."""
    files = _Files(Path(folder))
    files.probe()
    _move(optimizer, files)
    step = optimizer.step

    @wraps(step)
    def stepping(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
        _move(optimizer, files)  # what was loaded
        if all(p in optimizer.state for g in optimizer.param_groups for p in g["params"]):
            return step(*args, **kwargs)
        with _MakesFiles(files):
            found = step(*args, **kwargs)
        _move(optimizer, files)  # momentum begins as a copy of the gradient
        return found

    # A bound method: schedulers of learning rates ask for one.
    optimizer.step = MethodType(stepping, optimizer)  # type: ignore[method-assign]


class _Files:
    """Tensors in files of one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mapped: dict[int, weakref.ref[Tensor]] = {}
        """Tensors in files, by identity."""

    def probe(self) -> None:
        """Raises OptionError where no file can be made."""
        try:
            with tempfile.TemporaryFile(dir=self._folder):
                pass
        except OSError as error:
            raise OptionError(
                f"keep_states_on_disk: no file can be made in {self._folder}: {error.strerror}; "
                "name a folder that exists and can be written to"
            ) from error

    def takes(self, tensor: Tensor) -> bool:
        """Whether a tensor is one for a file, and is in none."""
        here = tensor.device.type == "cpu" and tensor.layout == torch.strided
        if not here or tensor.nbytes < LEAST_BYTES:
            return False
        known = self._mapped.get(id(tensor))
        return known is None or known() is not tensor

    def zeros_like(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Zeros of a tensor's shape, in a file."""
        dtype = dtype or tensor.dtype
        num_bytes = tensor.numel() * dtype.itemsize
        handle, name = tempfile.mkstemp(dir=self._folder, prefix="meshfold-state-")
        try:
            # A file that only claims its size would kill the process when the disk is full.
            os.posix_fallocate(handle, 0, num_bytes)
            found = torch.from_file(name, shared=True, size=tensor.numel(), dtype=dtype)
        except OSError as error:
            raise MeshfoldError(
                f"optimizer states: no room for {num_bytes} bytes in {self._folder}: "
                f"{error.strerror}; free some, or leave keep_states_on_disk out"
            ) from error
        finally:
            os.close(handle)
            os.unlink(name)
        found = found.view(tensor.shape)
        self._mapped[id(found)] = weakref.ref(found)
        return found


class _MakesFiles(TorchFunctionMode):
    """While open, torch.zeros_like of what is for a file is in one: with it optimizers make their
    states."""

    def __init__(self, files: _Files) -> None:
        super().__init__()
        self._files = files

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros_like and args[0].is_contiguous() and self._files.takes(args[0]):
            return self._files.zeros_like(args[0], kwargs.get("dtype"))
        return func(*args, **kwargs)


def _move(optimizer: Optimizer, files: _Files) -> None:
    """Move states that are in memory to files."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and files.takes(value):
                moved = files.zeros_like(value)
                moved.copy_(value)
                state[name] = moved
