"""Logs of torch about a trace that fails: an error of one line says it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_LOGGERS = (
    "torch._subclasses.fake_tensor",
    "torch.fx.experimental.proxy_tensor",
    "torch.fx.experimental.sym_node",
    "torch.fx.experimental.symbolic_shapes",
)


@contextmanager
def quiet_logs() -> Iterator[None]:
    """A context in which what traces with fake tensors writes no tracebacks and no graphs to the
    standard error, unless torch is set to debug it."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    quiet = [logger for logger in loggers if logger.getEffectiveLevel() > logging.INFO]
    levels = [logger.level for logger in quiet]
    for logger in quiet:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(quiet, levels, strict=True):
            logger.setLevel(level)
