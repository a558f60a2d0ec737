"""What a model's forward leaves behind in Python, for steps that must not see each other's.

A model in eval mode may keep tensors for its next forward, as LeViT does with its attention biases:
a second step would use what the first one's optimizer has changed since, and go through a graph
that the first backward has freed. The captured program keeps buffers alone, so that a model that is
held against it is put back in all else.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from meshfold.capture.python_state.snapshots import Snapshot, attributes_of


@contextmanager
def python_state_kept(model: nn.Module) -> Iterator[None]:
    """A context after which the attributes of all modules hold what they did before. Parameters and
    buffers stay as the context leaves them."""
    modules = list(model.modules())
    before = Snapshot(attributes_of(model))
    try:
        yield
    finally:
        if before.change():
            tensors = [(dict(m._parameters), dict(m._buffers)) for m in modules]
            before.restore()
            for module, (parameters, buffers) in zip(modules, tensors, strict=True):
                module._parameters.update(parameters)
                module._buffers.update(buffers)
