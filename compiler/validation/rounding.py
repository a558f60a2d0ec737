"""How far rounding alone moves gradients, and parameters after steps.

A gradient can be zero but for rounding: of a key's bias under softmax, of a bias before a batch
norm. Its size says nothing of the terms that were summed up, and two right programs differ by all
of it. So the model runs again in one process with what changes every rounding and nothing else:
parameters moved in their last bits, the backward scaled by a number that is no power of two and its
gradients scaled back. The largest change over the samples is the rounding of a tensor.

Where a ReLU is within rounding of its kink, a few samples may all fall on one side of it: there
are more of them where parameters differ after steps and no gradient of the first step does.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

SAMPLES = 3
MORE_SAMPLES = 16
MOVED = 2.0**-50
"""Of each parameter, relatively: four of its last bits."""

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Rounding:
    """Per name, by how much rounding moves the largest entry."""

    gradients: Mapping[str, float] = field(default_factory=dict)
    parameters: Mapping[str, float] = field(default_factory=dict)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters and buffers."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: x.detach().clone() for name, x in tensors}


def rounding_of(
    model: nn.Module,
    initial: Tensors,
    train: Callable[[float], tuple[Tensors, Tensors]],
    num_samples: int = SAMPLES,
) -> Rounding:
    """train: trains `model` with its backward scaled, and returns copies of the gradients of the
    first step and of the parameters at the end. initial: its state before, see state_of."""
    samples = []
    for number in range(num_samples + 1):
        _restore(model, initial, number)
        samples.append(train(1.0 + 0.3 * number / num_samples))
    gradients, parameters = zip(*samples, strict=True)
    return Rounding(_spread(gradients), _spread(parameters))


def _restore(model: nn.Module, initial: Tensors, number: int) -> None:
    """Sample 0 is the model itself."""
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(initial[name])
        for name, parameter in model.named_parameters():
            start = initial[name]
            noise = torch.rand(start.shape, generator=generator, dtype=torch.float64) - 0.5
            parameter.copy_(start if not number else start * (1.0 + 2.0 * MOVED * noise))
            parameter.grad = None


def _spread(samples: Sequence[Tensors]) -> dict[str, float]:
    """The largest change against sample 0; 0 for one that is no number."""
    first, *others = samples
    found = {}
    for name, x in first.items():
        changes = [(x - y[name]).abs().max().item() for y in others if x.numel()]
        found[name] = max((c for c in changes if math.isfinite(c)), default=0.0)
    return found
