"""What a forward does with gradients while it is traced.

What torch.autograd.grad computes in a forward is traced op by op. Without create_graph=True the
results carry no gradient, which the traced ops know nothing of: they are detached. A tensor that
`requires_grad_()` was called on keeps its gradient to itself, since nobody sees it afterwards.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from meshfold.capture.gradients.route import NextStepError, Route
from meshfold.capture.python_state.lost_calls import GRADIENT_MARKS
from meshfold.errors import CaptureError
from meshfold.torch_compat.fake_tensors import is_fake

_PLACE_OF_CREATE_GRAPH, _PLACE_OF_ALLOW_UNUSED = 4, 6

OTHER_GRADIENTS = "write it by formula, with torch.func.jvp, or outside of the model"


class InnerGradients:
    """What a traced forward does with gradients. asked: the function that it computes them with,
    at the line `source`. route: how they find their way back."""

    def __init__(self, route: Route) -> None:
        self.asked = self.source = ""
        self.route = route
        self._leaves: list[torch.Tensor] = []

    def seen(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
        line: Callable[[], str],
    ) -> Any:
        """The result of a call, without a gradient where torch gives it none."""
        if func in GRADIENT_MARKS and not isinstance(args[0], nn.Parameter):
            self._leaves.append(args[0])
        if func is not torch.autograd.grad:
            return result
        self.asked, self.source = "torch.autograd.grad", self.source or line()
        places = dict(enumerate(args))
        if kwargs.get("create_graph", places.get(_PLACE_OF_CREATE_GRAPH)):
            return result
        return tuple(None if g is None else g.detach() for g in result)

    def filled(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """The keyword arguments of a call, with zeros for slopes of slopes that parts know nothing
        of: the backward of a ReLU depends on its input for torch, where a choice does not."""
        is_known = func is not torch.autograd.grad or not self.route.is_in_parts
        if is_known or len(args) > _PLACE_OF_ALLOW_UNUSED or kwargs.get("allow_unused") is not None:
            return kwargs
        return {**kwargs, "materialize_grads": True}

    def going_back(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> AbstractContextManager[None]:
        """While a call runs that may compute gradients."""
        if func is not torch.autograd.grad:
            return nullcontext()
        names = dict(zip(("outputs", "inputs"), args, strict=False)) | dict(kwargs)
        return self.route.going_back(names["outputs"], names["inputs"])

    def repair(self) -> str:
        """What to do where a trace fails that computes gradients; "" for another one."""
        return self.asked and (
            "a gradient inside of forward goes through what a trace cannot take backward; "
            + OTHER_GRADIENTS
        )

    def refuse_unseen(self, constants: Mapping[str, Any]) -> None:
        """Raises NextStepError where a gradient went through what the trace does not know: results
        that autograd had kept, which are constants without values; CaptureError where there is no
        other step."""
        if not self.asked:
            return
        is_unseen = any(map(is_fake, _tensors(constants)))
        if (is_unseen or self.route.is_observing) and self.route.go_on():
            raise NextStepError
        if is_unseen:
            raise CaptureError(
                f"{self.asked} inside of forward goes back through results of ops, which a trace "
                f"does not see again; {OTHER_GRADIENTS}",
                op=self.asked,
                source=self.source,
            )

    def refuse_kept(self, model: nn.Module) -> tuple[torch.Tensor, ...]:
        """The tensors whose gradient ends with the call. Raises CaptureError for one that the
        model keeps and is neither parameter nor buffer: an optimizer may have it. (A codebook
        begins its loss with a buffer of zero, and asks for a gradient through it.)"""
        kept = {
            id(value)
            for module in model.modules()
            for name, held in vars(module).items()
            if name != "_buffers"
            for value in _contents(held)
        }
        if any(id(leaf) in kept for leaf in self._leaves):
            raise CaptureError(
                "forward calls requires_grad_ on a tensor that the model keeps and that is no "
                "parameter, so it would be frozen; register it as an nn.Parameter",
                op="torch.Tensor.requires_grad_",
            )
        return tuple(self._leaves)

    def refuse_accumulated(self, model: nn.Module, inputs: Iterable[torch.Tensor]) -> None:
        """Raises CaptureError where forward has written to `.grad`, which no graph does:
        torch.autograd.backward is no function that a mode sees, but it leaves this behind."""
        named = {f"of {name}": parameter for name, parameter in model.named_parameters()}
        others = dict.fromkeys((*self._leaves, *inputs), "of a tensor")
        for tensor, whose in (*((p, n) for n, p in named.items()), *others.items()):
            if tensor.is_leaf and tensor.grad is not None:
                raise CaptureError(
                    f"forward writes to .grad {whose}, by torch.autograd.backward or itself, which "
                    "is lost in a graph; return a loss, and call backward outside",
                    op="torch.autograd.backward",
                )


def _tensors(constants: Mapping[str, Any]) -> list[torch.Tensor]:
    return [c for c in constants.values() if isinstance(c, torch.Tensor)]


def _contents(held: Any) -> Iterable[Any]:
    if isinstance(held, Mapping):
        return held.values()
    return held if isinstance(held, (list, tuple)) else (held,)


class NoInnerGradients(TorchFunctionMode):
    """Refuses torch.autograd.grad where layers are no ops that it could go through."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.autograd.grad:
            raise CaptureError("forward calls torch.autograd.grad", op="torch.autograd.grad")
        return func(*args, **(kwargs or {}))
