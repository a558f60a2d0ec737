"""What experts must have in common so that one forward may run for all of them."""

from collections.abc import Sequence

from torch import nn


def are_alike(experts: Sequence[nn.Module]) -> bool:
    """Whether experts differ in nothing but the values of their parameters, all of which are those
    of linears, and none has hooks or a forward of its own. A list of modules may hold None."""
    return (
        all(isinstance(expert, nn.Module) for expert in experts)
        and len({type(expert) for expert in experts}) == 1
        and len({_build(expert) for expert in experts}) == 1
        and all(is_of_linears(expert) for expert in experts)
        and not any(has_hooks(part) for expert in experts for part in expert.modules())
    )


def is_of_linears(expert: nn.Module) -> bool:
    """Whether plain linears hold all that an expert holds."""
    held = [
        type(part) is nn.Linear
        for part in expert.modules()
        if next(part.parameters(False), None) is not None
        or next(part.buffers(False), None) is not None
    ]
    return len(held) > 0 and all(held)


def _build(expert: nn.Module) -> object:
    """What experts must have in common: modules and their settings, tensors by name."""
    settings = tuple(
        (path, type(part), name, value)
        for path, part in expert.named_modules()
        for name, value in sorted(vars(part).items())
        if isinstance(value, bool | int | float | str | None)
    )
    return settings, tuple((name, p.shape, p.dtype) for name, p in expert.named_parameters())


def has_only(expert: nn.Module, linears: tuple[str, ...]) -> bool:
    """Whether the weights of plain linears are all the tensors of an expert."""
    names = [name for name, _ in (*expert.named_parameters(), *expert.named_buffers())]
    return sorted(names) == sorted(f"{linear}.weight" for linear in linears) and all(
        type(getattr(expert, linear)) is nn.Linear for linear in linears
    )


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of a module does more than the forward of its class."""
    own_forward = "forward" in vars(module)
    return own_forward or bool(module._forward_hooks or module._forward_pre_hooks)
