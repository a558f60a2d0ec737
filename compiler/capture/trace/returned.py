"""Which of the tensors that a model returns are its loss and the outputs asked for.

The loss, in this order:

    named          Returns.loss; of several paths the sum
    "loss"         a scalar of that name
    ""             a bare tensor, whatever its shape
    the only one   the only scalar that gets a gradient; in a frozen model the only scalar

Of a model with several scalars and no name, and of one without any, nobody can tell: what is
captured is then all that it returns, and why there is no loss (`Chosen.no_loss`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from meshfold.capture.trace.loss_function import OUTPUTS, LossAndOutputs
from meshfold.capture.trace.structures import (
    Constant,
    Container,
    Leaf,
    Node,
    is_scalar,
    structure_of,
)
from meshfold.errors import OptionError
from meshfold.ir.returns import ALL, SUM, Returns
from meshfold.torch_compat.pytree import named_contents

NOTHING: Node = Constant(None)


@dataclass(frozen=True)
class Chosen:
    """tensors: what the program computes, by name, the loss first. returns: the same as was asked
    for, path by path. structure: what a step returns around them; a lone loss where no outputs were
    asked for. no_loss: why there is none."""

    tensors: dict[str, torch.Tensor]
    returns: Returns = Returns()
    structure: Node = NOTHING
    no_loss: str = ""


def name_outputs(returned: Any) -> dict[str, torch.Tensor]:
    """Tensors of what a model returned by path, "" for a bare tensor; None is left out."""
    return {name: x for name, x in named_contents(returned) if isinstance(x, torch.Tensor)}


def chosen_outputs(returned: Any, returns: Returns) -> Chosen:
    """The loss and the outputs. Raises OptionError for a path that leads to none."""
    named = name_outputs(returned)
    if not returns.has_loss:
        return Chosen(dict(named), replace(returns, outputs=tuple(named)), structure_of(returned))
    loss, why = _loss(named, returns)
    if not loss:
        return Chosen(dict(named), no_loss=why)
    name = SUM.join(loss)
    tensors = {name: total_of(loss, named)}
    found = replace(returns, loss=loss if name else (), outputs=())
    if not returns.outputs:
        return Chosen(tensors, found, Leaf(name))
    tensors |= {n: x for n, x in _outputs(named, returns, name).items() if n != name}
    found = replace(found, outputs=tuple(tensors))
    return Chosen(tensors, found, _structure(returned, name, named))


def total_of(loss: tuple[str, ...], named: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The sum of the losses of these paths."""
    first, *rest = (named[path] for path in loss)
    for other in rest:
        first = first + other
    return first


def named_total(name: str, returned: Any) -> torch.Tensor:
    """The loss called `name`, as OutputInfo.name has it, in what the model returned."""
    return total_of(tuple(name.split(SUM)), name_outputs(returned))


def _structure(returned: Any, loss: str, named: Mapping[str, torch.Tensor]) -> Node:
    """Where the loss is no tensor of the model's own, it stands beside what the model returned."""
    if isinstance(returned, LossAndOutputs):
        outputs = structure_of(returned.outputs, OUTPUTS)
    elif loss in named:
        return structure_of(returned)
    else:
        outputs = structure_of(returned)
    return Container(LossAndOutputs, "sequence", LossAndOutputs._fields, (Leaf(loss), outputs))


def _loss(named: Mapping[str, torch.Tensor], returns: Returns) -> tuple[tuple[str, ...], str]:
    """(paths of the summands, "") or ((), why there is no loss)."""
    if returns.loss:
        return tuple(_named_loss(path, named) for path in returns.loss), ""
    for name in ("loss", ""):
        if name in named and (is_scalar(named[name]) or not name):
            return (name,), ""
    scalars = {name: x for name, x in named.items() if is_scalar(x)}
    trained = {name: x for name, x in scalars.items() if x.requires_grad} or scalars
    if len(trained) == 1:
        return tuple(trained), ""
    if len(named) == 1:
        return tuple(named), ""
    if trained:
        paths = list(trained)
        return (), (
            f"the model returns several scalars that could be its loss ({', '.join(paths)}); name "
            f'one, CompileOptions(loss="{paths[0]}"), or their sum, loss="{SUM.join(paths[:2])}"'
        )
    return (), (
        f"the model returns several tensors ({', '.join(named)}) and none of them is its loss; "
        "pass labels, or a loss_fn, or wrap the model so that it returns its loss"
    )


def _named_loss(path: str, named: Mapping[str, torch.Tensor]) -> str:
    found = _found(path, named)
    if not is_scalar(named[found]):
        raise OptionError(
            f"loss {path!r} is a tensor of {named[found].dtype} and shape "
            f"{list(named[found].shape)}; a loss is a float without dims: name another, or pass a "
            "loss_fn"
        )
    return found


def _outputs(
    named: Mapping[str, torch.Tensor], returns: Returns, loss: str
) -> dict[str, torch.Tensor]:
    """The outputs asked for. loss: the name of the loss, which comes first whatever it is
    called."""
    if returns.outputs == ALL:
        return dict(named)
    found: dict[str, torch.Tensor] = {}
    for path in returns.outputs:
        if path == loss or (path == "loss" and path not in named):
            continue
        inside = [n for n in named if n.startswith((f"{path}.", f"{OUTPUTS}.{path}."))]
        names = inside or [_found(path, named)]
        found.update({name: named[name] for name in names})
    return found


def _found(path: str, named: Mapping[str, torch.Tensor]) -> str:
    """The name of the tensor that a path means: of what a loss_fn was given, without "outputs"."""
    for name in (path, f"{OUTPUTS}.{path}"):
        if name in named:
            return name
    raise OptionError(
        f"the model returns no tensor at {path!r}; name one that it returns: "
        f"{', '.join(map(repr, named))}"
    )
