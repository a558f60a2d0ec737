"""A training loop whose optimizer has other parameters than the compiled model's.

An optimizer that was made of the model before meshfold.compile steps without a complaint and
changes nothing: gradients are those of the compiled model's own parameters. So after some steps
with gradients a few numbers of each parameter are compared with what they were before the first.
"""

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

NUM_STEPS = 64
"""More than gradients are added up over, and few enough to lose no night."""
_NUMBERS = 8
_PARAMETERS = 16


class Untrained:
    """Counts steps with gradients."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._before: dict[str, Tensor] = {}

    def see(self, parameters: Mapping[str, Tensor]) -> None:
        """Before a step. Warns once, where none of the parameters has changed in NUM_STEPS."""
        if self._num_steps == 0:
            trained = [(n, p) for n, p in parameters.items() if p.requires_grad and p.numel()]
            self._before = {n: _some(p).clone() for n, p in trained[:_PARAMETERS]}
        self._num_steps += 1
        if self._num_steps != NUM_STEPS + 1 or not self._before:
            return
        before, self._before = self._before, {}
        # On what is elsewhere by now (offloaded, cast) there is nothing to say.
        if all(n in parameters and _is_same(_some(parameters[n]), x) for n, x in before.items()):
            warnings.warn(
                f"{NUM_STEPS} steps with gradients have changed no parameter; make the optimizer "
                "of the compiled model's parameters (compiled.parameters()), not of the model's "
                "that was compiled, and call its step()",
                stacklevel=5,
            )


def _some(parameter: Tensor) -> Tensor:
    return parameter.detach().reshape(-1)[:_NUMBERS]


def _is_same(now: Tensor, before: Tensor) -> bool:
    alike = (now.shape, now.dtype, now.device) == (before.shape, before.dtype, before.device)
    return alike and torch.equal(now, before)
