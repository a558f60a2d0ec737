"""Initial values of parameters and buffers, one module at a time.

A tensor of the given model that has values keeps them. One on the meta device is initialised as its
model would do it: by `reset_parameters` of its module, then by `_init_weights` of the model around
it (the Hugging Face convention; a model's own method of that name and signature works alike),
children before parents. Which call writes which tensor is found by running all calls on meta
tensors first, so a parent that re-initialises a weight of its child (GPT-2's scaled projections)
has the last word, as in the original.

The random generator is seeded per call, by module name: every rank and every plan gets the same
weights, and no more than one module's tensors are whole in memory at any time.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshfold.errors import MeshfoldError
from meshfold.torch_compat.skeletons import empty_like, meta_copy


@dataclass(frozen=True)
class _Writer:
    """A call that initialises tensors: `call(module)`."""

    name: str
    module: nn.Module
    call: Callable[[nn.Module], object]


def initial_values(
    model: nn.Module, needed: Sequence[str], *, seed: int, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """(name, full tensor) of the parameters and buffers `needed`, in no special order.

    Take what you keep before asking for the next. Tensors with values come as they are, others on
    `device`. Raises MeshfoldError for a tensor on meta that no call initialises.
    """
    tensors = _named_tensors(model)
    for name in needed:
        if not tensors[name].is_meta:
            yield name, tensors[name].detach()
    missing = [name for name in needed if tensors[name].is_meta]
    if missing:
        yield from _initialised(meta_copy(model), missing, seed, device)


def _initialised(
    skeleton: nn.Module, missing: Sequence[str], seed: int, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    tensors = _named_tensors(skeleton)
    writers = _writers(skeleton)
    written = _written(writers)
    # What one call finishes is made together.
    groups: dict[int, list[str]] = {}
    for name in missing:
        calls = written.get(id(tensors[name]))
        if not calls:
            raise _no_value(name)
        groups.setdefault(calls[-1], []).append(name)
    for last in sorted(groups):
        names = groups[last]
        calls = sorted({number for name in names for number in written[id(tensors[name])]})
        with _Materialized(skeleton, [tensors[name] for name in names], device) as values:
            with torch.random.fork_rng(_generators(device)), torch.no_grad():
                for number in calls:
                    writer = writers[number]
                    torch.manual_seed(_seed(seed, writer.name))
                    writer.call(writer.module)
            for name, value in zip(names, values, strict=True):
                if _is_untouched(value):
                    raise _no_value(name)
                yield name, value.detach()


def _no_value(name: str) -> MeshfoldError:
    return MeshfoldError(
        f"{name} is on the meta device and neither reset_parameters nor _init_weights of its model "
        "gives it a value; give it one, or build the model off meta"
    )


def _is_untouched(value: Tensor) -> bool:
    """Whether the ends of a float tensor still hold the NaN they were made with."""
    if not (value.is_floating_point() and value.numel()):
        return False
    return bool(value.detach().flatten()[[0, -1]].isnan().any())


class _Materialized:
    """While open, some meta tensors of a model are real, on a device, floats full of NaN."""

    def __init__(self, model: nn.Module, metas: Sequence[Tensor], device: torch.device) -> None:
        self._values = [_untouched(meta, device) for meta in metas]
        wanted = {id(m): v for m, v in zip(metas, self._values, strict=True)}
        tables: list[dict[str, Any]] = []
        for module in model.modules():
            tables += [module._parameters, module._buffers]
        self._places = [
            (table, key, tensor, wanted[id(tensor)])
            for table in tables
            for key, tensor in table.items()
            if id(tensor) in wanted
        ]

    def __enter__(self) -> list[Tensor]:
        for table, key, _, value in self._places:
            table[key] = value
        return self._values

    def __exit__(self, *exception: object) -> None:
        for table, key, meta, _ in self._places:
            table[key] = meta


def _untouched(meta: Tensor, device: torch.device) -> Tensor:
    value = empty_like(meta, device)
    if value.is_floating_point():
        value.detach().fill_(math.nan)
    return value


def _writers(model: nn.Module) -> list[_Writer]:
    """All calls in the order in which building the model would make them."""
    calls = []
    for name, module in model.named_modules():
        for method in ("reset_parameters", "_reset_parameters"):
            reset = getattr(type(module), method, None)
            if callable(reset):
                calls.append(_Writer(f"{name}:{method}", module, reset))
                break
    calls.extend(_init_weights_calls(model, "", None))
    return calls


def _init_weights_calls(
    module: nn.Module, name: str, init: Callable[[nn.Module], object] | None
) -> Iterator[_Writer]:
    """`_init_weights` of the innermost model around each module, children first."""
    own = getattr(module, "_init_weights", None)
    init = own if callable(own) else init
    for key, child in module.named_children():
        yield from _init_weights_calls(child, f"{name}.{key}" if name else key, init)
    if init is not None:
        yield _Writer(f"{name}:_init_weights", module, init)


class _Touched(TorchFunctionMode):
    """Collects tensors that a call may write without moving their version counter: through `.data`,
    or not at all because they are on meta, which trunc_normal_ asks first."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: set[int] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _HIDDEN_WRITES:
            self.tensors.add(id(args[0]))
        return func(*args, **(kwargs or {}))


_HIDDEN_WRITES = (torch.Tensor.is_meta.__get__, torch.Tensor.data.__get__)  # type: ignore[attr-defined]


def _written(writers: Sequence[_Writer]) -> dict[int, list[int]]:
    """Per tensor (by identity) the numbers of the calls that write it, ascending."""
    found: dict[int, list[int]] = {}
    for number, writer in enumerate(writers):
        inside = [*writer.module.parameters(), *writer.module.buffers()]
        versions = [t._version for t in inside]
        with torch.random.fork_rng([]), torch.no_grad(), _Touched() as touched:
            writer.call(writer.module)
        for tensor, version in zip(inside, versions, strict=True):
            if tensor._version != version or id(tensor) in touched.tensors:
                found.setdefault(id(tensor), []).append(number)
    return found


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _seed(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _generators(device: torch.device) -> list[torch.device]:
    return [] if device.type == "cpu" else [device]
