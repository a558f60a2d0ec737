"""Hooks of parameters under a plan with microbatches: once per step, on the gradient of all of it.

Autograd calls a hook with every microbatch's share of the gradient. What clamps or scales it would
do so to each share, and with gradients that are reduced at the end there is none for most of them.
So hooks that are registered on the parameters of such a plan wait here for the end of the step.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from meshfold.training.shards.local_shard import mark_gradient

Hooks = OrderedDict[int, Callable[[Tensor], Any]]


class StepHooks:
    """What is registered on `parameters`, by canonical name. sharded: those whose gradients are
    LocalShards."""

    def __init__(self, parameters: Mapping[str, Tensor], sharded: frozenset[str]) -> None:
        self._parameters = dict(parameters)
        self._sharded = sharded
        self._on_gradient: dict[str, Hooks] = {name: OrderedDict() for name in parameters}
        self._after: dict[str, Hooks] = {name: OrderedDict() for name in parameters}
        for name, parameter in parameters.items():
            # A method of this one tensor, in front of that of its class.
            vars(parameter).update(
                register_hook=_registering(self._on_gradient[name]),
                register_post_accumulate_grad_hook=_registering(self._after[name]),
            )

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """Inside, a step adds its gradients to `.grad`; behind it hooks have seen them."""
        seen = {name for hooks in (self._on_gradient, self._after) for name in hooks if hooks[name]}
        hooked = {name: p for name, p in self._parameters.items() if name in seen}
        earlier = {name: parameter.grad for name, parameter in hooked.items()}
        for parameter in hooked.values():
            parameter.grad = None
        try:
            yield
        except BaseException:
            for name, parameter in hooked.items():
                parameter.grad = earlier[name]
            raise
        for name, parameter in hooked.items():
            self._finish(name, parameter, earlier[name])

    def _finish(self, name: str, parameter: Tensor, earlier: Tensor | None) -> None:
        if parameter.grad is None:
            parameter.grad = earlier
            return
        if name in self._sharded:
            mark_gradient(parameter)
        with torch.no_grad():
            for hook in list(self._on_gradient[name].values()):
                changed = hook(parameter.grad)
                if changed is not None:
                    parameter.grad = changed
            if earlier is not None:
                parameter.grad = earlier.add_(parameter.grad)
        for hook in list(self._after[name].values()):
            hook(parameter)


def _registering(hooks: Hooks) -> Callable[[Callable[[Tensor], Any]], RemovableHandle]:
    def register(hook: Callable[[Tensor], Any]) -> RemovableHandle:
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    return register
