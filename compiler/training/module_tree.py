"""The module tree of a compiled model: that of the original, with shards in place of tensors;
copies of it, and what was changed in it since."""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from meshfold.errors import MeshfoldError, OptionError
from meshfold.ir.op_graph import FoldedGraph
from meshfold.torch_compat.dtypes import dtype_name
from meshfold.training.calls.captured_mode import depends_on_mode
from meshfold.training.foreign_wrappers import OwnParallelism, PartOfModel

M = TypeVar("M", bound=nn.Module)


def canonical_names(folded: FoldedGraph) -> dict[str, str]:
    """By every name of a parameter or buffer the first one of the same tensor."""
    names = [(p.name, p.aliases) for p in folded.parameters]
    names += [(b.name, b.aliases) for b in folded.buffers]
    return {name: first for first, aliases in names for name in (first, *aliases)}


@dataclass(frozen=True)
class BoundTensors:
    """The tensors of a module tree that its program reads. canonical: see canonical_names; forms:
    shape and dtype of each, by canonical name, when the model was compiled. fixed: values of
    buffers that the program has as constants."""

    canonical: Mapping[str, str]
    forms: Mapping[str, tuple[torch.Size, torch.dtype]]
    fixed: Mapping[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(
        root: nn.Module, canonical: Mapping[str, str], fixed: Mapping[str, Tensor]
    ) -> "BoundTensors":
        named = (*root.named_parameters(), *root.named_buffers())
        forms = {canonical[n]: (x.shape, x.dtype) for n, x in named}
        values = {canonical[n]: x for n, x in fixed.items() if canonical.get(n) in forms}
        return BoundTensors(canonical, forms, values)

    def by_name(self, named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """By canonical name. Raises OptionError for one that the compiled model did not have."""
        found: dict[str, Tensor] = {}
        for name, tensor in named:
            if name not in self.canonical:
                raise OptionError(f"{name} was put into the compiled model; {_WHAT_NEXT}")
            found[self.canonical[name]] = tensor
        return found

    def check(self, root: nn.Module) -> None:
        """Raises OptionError where something is different in `root`."""
        if change := self.change(root):
            raise OptionError(change)

    def change(self, root: nn.Module) -> str:
        """What is different in `root`, in one line; "" if nothing is."""
        try:
            now = self.by_name((*root.named_parameters(), *root.named_buffers()))
        except OptionError as error:
            return str(error)
        for name, form in self.forms.items():
            if name not in now:
                return f"{name} was taken out of the compiled model; {_WHAT_NEXT}"
            if now[name].is_meta:
                return f"{name} is on the meta device on this rank, without values; {_WHAT_NEXT}"
            if (now[name].shape, now[name].dtype) != form:
                return (
                    f"{name} is {_text(now[name].shape, now[name].dtype)} on this rank, and was "
                    f"compiled as {_text(*form)}; {_WHAT_NEXT}"
                )
        for name, value in self.fixed.items():
            if now[name].item() != value.item():
                return (
                    f"the buffer {name} is {now[name].item():g}, and was {value.item():g} when the "
                    "model was captured, which decides what forward does; compile the model again"
                )
        return ""


_WHAT_NEXT = (
    "a program runs the tensors that it was compiled for, with new numbers at most; change the "
    "model before meshfold.compile"
)


def _text(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{dtype_name(dtype)}{list(shape)}"


def copied(
    module: M, memo: dict[int, Any], shared: Iterable[str], fresh: Mapping[str, object]
) -> M:
    """A copy of a module and its tensors, as of copy.deepcopy. shared: attributes that the copy has
    in common with it, where there are such; fresh: those that are other ones in the copy."""
    own = vars(module)
    memo.update({id(own[name]): own[name] for name in shared if name in own})
    made = module.__class__.__new__(module.__class__)
    memo[id(module)] = made
    kept = {name: value for name, value in own.items() if name not in fresh}
    vars(made).update(copy.deepcopy(kept, memo))
    vars(made).update(fresh)
    return made


def register_shards(
    root: nn.Module,
    model: nn.Module,
    canonical: Mapping[str, str],
    parameters: Mapping[str, nn.Parameter],
    buffers: Mapping[str, Tensor],
    persistent: Mapping[str, bool],
) -> None:
    """Registers local tensors in `root` under the names of `model`, in its order. canonical: the
    name of each tensor's first occurrence, by which the others are given. Of what other stages hold
    there are the modules, so that all ranks can run the same lines."""
    named = (model.named_parameters, model.named_buffers)
    for name, _ in chain(*(tensors(remove_duplicate=False) for tensors in named)):
        first = canonical[name]
        owner, leaf = _owner(root, name, model)
        if first in parameters:
            owner.register_parameter(leaf, parameters[first])
        elif first in buffers:  # frozen parameters that forward writes, too
            owner.register_buffer(leaf, buffers[first], persistent=persistent[first])
        elif isinstance(owner, OwnParallelism):
            owner.elsewhere = owner.elsewhere | {leaf}


def _owner(root: nn.Module, name: str, model: nn.Module) -> tuple[nn.Module, str]:
    """The module that holds the tensor called `name`, made if needed, and its name in there."""
    *path, leaf = name.split(".")
    module = root
    for part in path:
        model = model.get_submodule(part)
        if part not in module._modules:
            if hasattr(module, part):
                raise MeshfoldError(
                    f"the model calls a submodule {part!r}, which is an attribute of "
                    "CompiledModel; rename it in the model"
                )
            made = PartOfModel()
            vars(made)["mode"] = model.training if depends_on_mode(model) else None
            module.add_module(part, made)
        module = module._modules[part]  # type: ignore[assignment]
    return module, leaf
