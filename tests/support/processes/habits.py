"""Loops as people write them around a compiled model, on gloo processes and in one."""

import warnings
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers.optimization import Adafactor as HuggingFaceAdafactor

import meshfold
from meshfold.api import bind, plan_captured
from meshfold.capture.pipeline import Captured, capture
from meshfold.errors import MeshfoldError
from meshfold.ir.plan import Plan
from support.processes.agreement import CLUSTER, batch, model

Parameters = Iterable[nn.Parameter]


class Lamb(torch.optim.Optimizer):
    """Steps by the norm of each parameter and of its own update."""

    def __init__(self, parameters: Parameters, lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                mean = self.state[parameter].setdefault("mean", torch.zeros(parameter.shape))
                mean.lerp_(parameter.grad, 0.1)
                parameter.sub_(mean, alpha=group["lr"] * float(parameter.norm() / mean.norm()))


class ByHand(torch.optim.Optimizer):
    """`p -= lr * p.grad`, as in a tutorial, and gradients that are set to None by hand."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p -= 1e-2 * p.grad
                p.grad = None


OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4, foreach=True),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, eps=1e-4, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "SGD, foreach": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, foreach=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, eps=1e-4, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=1e-4),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2, eps=1e-4),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2, eps=1e-4),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-2, eps=1e-4),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "by hand": lambda p: ByHand(p),
    "LAMB": lambda p: Lamb(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "Muon": lambda p: torch.optim.Muon([x for x in p if x.dim() == 2], lr=1e-2),
    "Adafactor of transformers": lambda p: HuggingFaceAdafactor(p),
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=2),
}


def _clip_value(made: nn.Module) -> None:
    nn.utils.clip_grad_value_(made.parameters(), 1e-3)


def _clip_norm(made: nn.Module) -> None:
    nn.utils.clip_grad_norm_(made.parameters(), 1e-2)


def _clip_norm_slowly(made: nn.Module) -> None:
    nn.utils.clip_grad_norm_(made.parameters(), 1e-2, foreach=False)


def _own_clip(made: nn.Module) -> None:
    clip = made.clip_grad_norm_ if isinstance(made, meshfold.CompiledModel) else None
    (clip or (lambda norm: nn.utils.clip_grad_norm_(made.parameters(), norm)))(1e-2)


def _log_norms(made: nn.Module) -> None:
    for parameter in made.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(float(parameter.grad.norm()) + 1.0)


def _skip_what_is_not_finite(made: nn.Module) -> None:
    if not all(p.grad.isfinite().all() for p in made.parameters() if p.grad is not None):
        made.zero_grad()


def _penalty_of_norms(made: nn.Module) -> None:
    torch.stack([p.norm() for p in made.parameters()]).sum().mul(0.01).backward()


def _normalized_rows(made: nn.Module) -> None:
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(nn.functional.normalize(parameter, dim=0))


def _decay_by_hand(made: nn.Module) -> None:
    for parameter in made.parameters():
        parameter.data.mul_(0.9).clamp_(-0.2, 0.2)


def _pruned(made: nn.Module) -> None:
    with torch.no_grad():
        for parameter in made.parameters():
            parameter[parameter.abs() < 0.05] = 0.0


def _hooks_clamp(made: nn.Module) -> None:
    for parameter in made.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


def _hooks_of_norms(made: nn.Module) -> None:
    for parameter in made.parameters():
        parameter.register_hook(lambda gradient: gradient / (gradient.norm() + 1.0))


def _noise(made: nn.Module) -> None:
    torch.manual_seed(3)
    for parameter in made.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=1e-3)


def _initialise(made: nn.Module) -> None:
    torch.manual_seed(3)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.02)


def _nothing(made: nn.Module) -> None:
    pass


BETWEEN: dict[str, Callable[[nn.Module], None]] = {
    "nothing": _nothing,
    "clip_grad_value_": _clip_value,
    "clip_grad_norm_": _clip_norm,
    "clip_grad_norm_, no foreach": _clip_norm_slowly,
    "model.clip_grad_norm_": _own_clip,
    "norms of gradients": _log_norms,
    "skip what is not finite": _skip_what_is_not_finite,
    "penalty of norms": _penalty_of_norms,
    "normalized rows": _normalized_rows,
    "decay by hand": _decay_by_hand,
    "pruned": _pruned,
    "hooks that clamp": _hooks_clamp,
    "hooks that take norms": _hooks_of_norms,
    "noise": _noise,
    "initialise": _initialise,
}
"""What is done between backward and the optimizer's step."""

WRAPPERS: dict[str, Callable[[nn.Module], object]] = {
    "DistributedDataParallel": DistributedDataParallel,
    "FullyShardedDataParallel": lambda made: FullyShardedDataParallel(
        made, device_id=torch.device("cpu")
    ),
    "fully_shard": fully_shard,
}


def losses(made: nn.Module, optimizer_name: str, between: str) -> list[float]:
    """Of three steps of a training loop."""
    optimizer = OPTIMIZERS[optimizer_name](list(made.parameters()))
    found = []
    for _ in range(3):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            if isinstance(made, meshfold.CompiledModel):
                loss: torch.Tensor = made.train_step(batch())
            else:
                loss = made(**batch())
                loss.backward()
            BETWEEN[between](made)
            return loss.detach()

        if isinstance(optimizer, torch.optim.LBFGS):
            found.append(float(optimizer.step(closure)))
        else:
            found.append(float(closure()))
            optimizer.step()
    return found


@cache
def captured() -> Captured:
    return capture(model(), batch())


@cache
def planned(**pins: Any) -> Plan:
    return plan_captured(
        captured(), "Mlp", CLUSTER, meshfold.CompileOptions(pins={"microbatches": 1, **pins})
    )


def compiled(pins: dict[str, Any]) -> meshfold.CompiledModel:
    """A model of its own for every loop, of one plan: what compile() does, but the search once."""
    return bind(model(), planned(**pins), captured(), batch())


def compiled_losses(pins: dict[str, Any], loops: list[tuple[str, str]]) -> list[list[float] | str]:
    """Per (optimizer, what is between) the losses, or the line that refuses it."""
    results: list[list[float] | str] = []
    for optimizer_name, between in loops:
        made = compiled(pins)
        try:
            results.append(losses(made, optimizer_name, between))
        except MeshfoldError as error:
            results.append(str(error))
        made.close()
    return results


def wrapped(pins: dict[str, Any]) -> dict[str, str]:
    """Per wrapper the line that refuses it."""
    lines = {}
    for name, wrap in WRAPPERS.items():
        made = compiled(pins)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                wrap(made)
            lines[name] = ""
        except MeshfoldError as error:
            lines[name] = str(error)
        made.close()
    return lines
