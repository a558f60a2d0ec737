"""Hooks of all modules of the process. The one file that knows torch's tables of them."""

from typing import Any

from torch.nn.modules import module as torch_module

from meshfold.errors import moved

_TABLES = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
    "_global_buffer_registration_hooks",
    "_global_module_registration_hooks",
    "_global_parameter_registration_hooks",
)


def global_hooks() -> dict[str, dict[int, Any]]:
    """The tables of torch, by name, in which something is registered."""
    return {name: table for name, table in hook_tables().items() if table}


def hook_tables() -> dict[str, dict[int, Any]]:
    """All tables of torch, by name."""
    missing = [name for name in _TABLES if not hasattr(torch_module, name)]
    if missing:  # pragma: no cover
        raise moved(missing[0])
    return {name: getattr(torch_module, name) for name in _TABLES}
