"""What a model's forward leaves behind in Python, for steps that must not see each other's.

A model in eval mode may keep tensors for its next forward, as LeViT does with its attention biases:
a second step would use what the first one's optimizer has changed since, and go through a graph
that the first backward has freed. The captured program keeps buffers alone, so that a model that is
held against it is put back in all else.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from meshfold.capture.python_state.snapshots import Snapshot, attributes_of


@contextmanager
def python_state_kept(model: nn.Module) -> Iterator[None]:
    """A context after which the attributes of all modules hold what they did before. Parameters and
    buffers stay as the context leaves them."""
    modules = list(model.modules())
    before = Snapshot(attributes_of(model))
    hooks = [(table, dict(table)) for module in modules for table in _hooks(module)]
    try:
        yield
    finally:
        if before.change():
            tensors = [(dict(m._parameters), dict(m._buffers)) for m in modules]
            before.restore()
            for module, (parameters, buffers) in zip(modules, tensors, strict=True):
                module._parameters.update(parameters)
                module._buffers.update(buffers)
            for table, held in hooks:
                if table != held:
                    table.clear()
                    table.update(held)


def _hooks(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """Which a first forward may register, as models of transformers do, and note that it has."""
    return (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._forward_hooks_with_kwargs,
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks_always_called,
    )
