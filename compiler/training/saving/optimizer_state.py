"""State of an optimizer over a CompiledModel's parameters, by their names: out and back in."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from meshfold.checkpoint_files.index import Index, SavedGroup, SavedOptimizer
from meshfold.checkpoint_files.values import encoded, tensor_names
from meshfold.errors import MeshfoldError, OptionError
from meshfold.low_precision.states import LowPrecisionStates
from meshfold.training.compiled_model import CompiledModel

State = dict[str, dict[str, Any]]
"""By parameter and key. What is shaped as the parameter is in the form that state_dict gives."""


def state_of(model: CompiledModel, optimizer: torch.optim.Optimizer) -> State:
    """Of this rank's parameters. Called on all ranks together."""
    found: State = {}
    for name, parameter in model.named_parameters():
        values = _values(optimizer, parameter)
        found[name] = {
            key: model.saved_form(name, value) if _is_like(value, parameter.shape) else value
            for key, value in values.items()
        }
    return found


def encoded_optimizer(
    model: CompiledModel,
    optimizer: torch.optim.Optimizer,
    state: State,
    shared: dict[str, Tensor],
    own: dict[str, Tensor],
) -> SavedOptimizer:
    """The record of an optimizer. Tensors that all ranks have are put into `shared`, those of this
    rank's parameters into `own`. Raises OptionError for what cannot be saved."""
    groups = tuple(
        SavedGroup(names, encoded(options, f"optimizer.groups[{k}]", shared))
        for k, (names, options) in enumerate(_groups(model, optimizer))
    )
    nodes: dict[str, dict[str, Any]] = {}
    for name, values in state.items():
        nodes[name] = {}
        for key, value in values.items():
            where = f"optimizer.{name}.{key}"
            if _is_like(value, model.global_shape(name)):
                own[where], nodes[name][key] = value, {"tensor": where}
            else:
                parts: dict[str, Tensor] = {}
                nodes[name][key] = encoded(value, where, parts)
                _check_numbers(model, name, {w: tuple(x.shape) for w, x in parts.items()})
                own |= parts
    return SavedOptimizer(_kind(optimizer), groups, nodes)


def merged(parts: list[SavedOptimizer]) -> SavedOptimizer:
    """The optimizer of all ranks, of which those of one pipeline stage have its parameters only."""
    groups = tuple(
        SavedGroup(tuple(sorted({n for g in same for n in g.parameters})), same[0].options)
        for same in zip(*(part.groups for part in parts), strict=True)
    )
    state = {name: values for part in parts for name, values in part.state.items()}
    return SavedOptimizer(parts[0].kind, groups, state)


def check_optimizer(
    model: CompiledModel, optimizer: torch.optim.Optimizer, index: Index
) -> SavedOptimizer:
    """The saved optimizer, if it is of this one's kind. Raises OptionError with what differs."""
    saved = index.optimizer
    if saved is None:
        raise OptionError("saved without an optimizer; load the model alone")
    kind = _kind(optimizer)
    if saved.kind != kind:
        raise OptionError(f"the optimizer was of kind {saved.kind}, this one is {kind}; {_ALIKE}")
    groups = _groups(model, optimizer)
    if len(groups) != len(saved.groups):
        raise OptionError(
            f"the optimizer was saved with {len(saved.groups)} groups of parameters, this one has "
            f"{len(groups)}; {_ALIKE}"
        )
    then = {name: k for k, group in enumerate(saved.groups) for name in group.parameters}
    now = {name: k for k, (names, _) in enumerate(groups) for name in names}
    for name, _ in model.named_parameters():
        if then.get(name) != now.get(name):
            was, now_in = (f"group {p[name]}" if name in p else "no group" for p in (then, now))
            raise OptionError(f"{name} was in {was} of the optimizer, and is in {now_in}; {_ALIKE}")
        shapes = {where: index.tensors[where].shape for where in _tensors(saved, name, index)}
        whole = model.global_shape(name)
        _check_numbers(model, name, {w: shape for w, shape in shapes.items() if shape != whole})
    return saved


def localized(model: CompiledModel, state: State) -> State:
    """The values of this rank of what was read. Called on all ranks together."""
    return {
        name: {
            key: model.local_form(name, x) if _is_like(x, model.global_shape(name)) else x
            for key, x in values.items()
        }
        for name, values in state.items()
    }


def restore(
    model: CompiledModel,
    optimizer: torch.optim.Optimizer,
    state: State,
    options: list[dict[str, Any]],
) -> None:
    """Take over what was saved; it replaces all that was there."""
    for group, saved in zip(optimizer.param_groups, options, strict=True):
        group.update(saved)
    # As torch's own: counts of steps stay on the host, but for kernels that read them.
    read_by_kernels = {
        id(parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if group.get("capturable") or group.get("fused")
    }
    for name, parameter in model.named_parameters():
        optimizer.state.pop(parameter, None)
        is_read = id(parameter) in read_by_kernels
        if values := state.get(name):
            here = {
                k: x.to(parameter.device)
                if isinstance(x, Tensor) and (is_read or x.numel() > 1)
                else x
                for k, x in values.items()
            }
            if isinstance(optimizer, LowPrecisionStates):
                optimizer.pack(parameter, here)
            else:
                optimizer.state[parameter] = here


_ALIKE = "make it alike, or load the model alone"


def _kind(optimizer: torch.optim.Optimizer) -> str:
    """Its name in a checkpoint, which is the same whatever the precision of its states."""
    if isinstance(optimizer, LowPrecisionStates):
        optimizer = optimizer.inner
    return type(optimizer).__name__


def _values(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Mapping[str, Any]:
    """The states of a parameter, unpacked."""
    if isinstance(optimizer, LowPrecisionStates):
        return optimizer.unpacked(parameter)
    found: Mapping[str, Any] = optimizer.state.get(parameter, {})
    return found


def _is_like(value: Any, shape: tuple[int, ...]) -> bool:
    return isinstance(value, Tensor) and tuple(value.shape) == tuple(shape)


def _groups(
    model: CompiledModel, optimizer: torch.optim.Optimizer
) -> list[tuple[tuple[str, ...], dict[str, Any]]]:
    """Names of parameters and options of every group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = []
    for k, group in enumerate(optimizer.param_groups):
        if any(id(p) not in names for p in group["params"]):
            raise OptionError(
                f"group {k} of the optimizer holds a tensor that is no parameter of the model; "
                "give it an optimizer of its own"
            )
        options = {key: value for key, value in group.items() if key != "params"}
        found.append((tuple(names[id(p)] for p in group["params"]), options))
    return found


def _tensors(saved: SavedOptimizer, name: str, index: Index) -> Iterator[str]:
    for node in saved.state.get(name, {}).values():
        for where in tensor_names(node):
            if where not in index.tensors:
                raise MeshfoldError(f"the index names no tensor {where}")
            yield where


def _check_numbers(model: CompiledModel, name: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuses states of the parameter `name` that ranks which hold shards of it cannot share. Those
    of a whole parameter, as Adafactor's rows and columns, every rank has alike."""
    many = {where: shape for where, shape in shapes.items() if torch.Size(shape).numel() > 1}
    if not many or model.plan.world_size == 1:
        return
    if tuple(dict(model.named_parameters())[name].shape) == tuple(model.global_shape(name)):
        return
    where, shape = next(iter(many.items()))
    raise OptionError(
        f"{where} has shape {list(shape)}, neither its parameter's nor one number, so what "
        "belongs to which rank is unknown; save or load the model alone, or train under a plan "
        "where ranks have whole parameters"
    )
