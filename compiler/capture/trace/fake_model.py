"""The fake copy: the user's model on fake tensors, and names for what it holds.

No storage is allocated whatever the model's size, and the user's model is not touched.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from meshfold.capture.expert_loops.forms import without_loops
from meshfold.capture.gradients.route import Route
from meshfold.capture.known_values.fixed_inputs import fixed_inputs
from meshfold.capture.library_modules.adaptive_softmax import with_whole_clusters
from meshfold.capture.library_modules.hugging_face import hugging_face_models, run_experts_as
from meshfold.capture.trace.functions import FunctionCalls
from meshfold.capture.trace.loss_function import LossFunction, call_model
from meshfold.capture.trace.mixed_precision import MASTER_DTYPE, narrow_dtype, parameter_casts
from meshfold.errors import CaptureError, OptionError
from meshfold.ir.op_graph import BufferInfo, InputInfo, ParameterInfo, Source, SourceKind
from meshfold.ir.options import Precision
from meshfold.torch_compat.dtypes import dtype_name
from meshfold.torch_compat.fake_tensors import FakeTensorMode, fake_like, fake_mode
from meshfold.torch_compat.pytree import TensorSlot, fill_slots, map_leaves, map_named
from meshfold.torch_compat.skeletons import copy_with


@dataclass(frozen=True)
class Names:
    """Parameters and buffers of a model under their canonical names, the first of each tensor.

    `sources` maps every name, aliases too, to where the value comes from. `masters` are the
    parameters that ops read in a narrower dtype than they are stored in.
    """

    parameters: tuple[ParameterInfo, ...]
    buffers: tuple[BufferInfo, ...]
    sources: Mapping[str, Source]
    masters: frozenset[str] = frozenset()


@dataclass(frozen=True)
class FakeCopy:
    """`module` runs under `mode`. `notes` tell what differs from the user's model. `functions`: the
    calls of custom autograd.Functions that were met. `route`: of gradients inside of forward."""

    module: nn.Module
    mode: FakeTensorMode
    notes: tuple[str, ...]
    functions: FunctionCalls = field(default_factory=FunctionCalls)
    route: Route = field(default_factory=Route)


def model_names(
    model: nn.Module, precision: Precision = "model", written: Collection[str] = ()
) -> Names:
    """Canonical names by identity of the tensors: a tied tensor is one, under its first name.
    written: frozen parameters that forward changes, which are buffers of the graph.

    Under a narrow precision trained parameters that it casts are stored in float32, frozen ones as
    they are read. Raises CaptureError for a written one among these: it would lose small changes.
    """
    casts = parameter_casts(model, precision)
    groups: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    parameters_first: Iterable[tuple[str, torch.Tensor]] = itertools.chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    for name, tensor in parameters_first:
        groups.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    parameters: list[ParameterInfo] = []
    buffers: list[BufferInfo] = []
    sources: dict[str, Source] = {}
    masters: set[str] = set()
    for key, (name, *aliases) in groups.items():
        tensor = tensors[key]
        _refuse_layout(tensor, name)
        shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
        if name in written and key in casts and casts[key] != tensor.dtype:
            raise CaptureError(
                f"forward writes the frozen parameter {name}, which precision={precision!r} keeps "
                "in few digits, so that small changes are lost; make it a buffer, or compile with "
                "precision='model'",
                op=name,
            )
        if isinstance(tensor, nn.Parameter) and name not in written:
            kind = SourceKind.PARAMETER
            if key in casts:
                read = dtype_name(casts[key])
                dtype = MASTER_DTYPE if tensor.requires_grad else read
                if dtype != read:
                    masters.add(name)
            info = ParameterInfo(name, shape, dtype, tensor.requires_grad, tuple(aliases))
            parameters.append(info)
        else:
            kind = SourceKind.BUFFER
            is_parameter = isinstance(tensor, nn.Parameter)
            persistent = is_parameter or any(_is_persistent(model, n) for n in (name, *aliases))
            buffers.append(BufferInfo(name, shape, dtype, persistent, tuple(aliases)))
        sources.update(dict.fromkeys((name, *aliases), Source(kind, name)))
    return Names(tuple(parameters), tuple(buffers), sources, frozenset(masters))


def _refuse_layout(tensor: torch.Tensor, name: str) -> None:
    """Refuses sparse and nested tensors."""
    if tensor.layout is not torch.strided:
        raise CaptureError(
            f"{name} has the layout {tensor.layout}, of which ranks have no shards; pass it dense "
            "(to_dense()), or its indices and values, and use index_add or scatter_add",
            op=name,
        )


def _is_persistent(model: nn.Module, name: str) -> bool:
    owner, _, leaf = name.rpartition(".")
    return leaf not in model.get_submodule(owner)._non_persistent_buffers_set


def fake_copy(model: nn.Module, precision: Precision = "model") -> FakeCopy:
    """A fake copy of `model`, real or on the meta device, ready to be traced in `precision`.

    Raises CaptureError if the model cannot be copied.
    """
    mode = fake_mode()
    casts = parameter_casts(model, precision)
    try:
        fake = copy_with(model, lambda t: fake_like(t, mode, casts.get(id(t), t.dtype)))
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__} cannot be copied: {error}; keep what deepcopy refuses "
            "(locks, handles, open files) out of the model",
            op=type(model).__name__,
        ) from error
    return FakeCopy(fake, mode, _settle(fake))


def _settle(fake: Any) -> tuple[str, ...]:
    """Set the copy, and configurations of Hugging Face models in it, to what a graph can hold."""
    notes = [*without_loops(fake), *with_whole_clusters(fake)]
    # The model's own too: code of a model that is no part of Hugging Face asks it in the same way.
    configs: list[Any] = [getattr(m, "config", None) for m in (fake, *hugging_face_models(fake))]
    cached = [config for config in configs if getattr(config, "use_cache", False)]
    for config in cached:
        config.use_cache = False
    if cached:
        notes.append("use_cache is off in the graph: a training step keeps no key/value cache")
    # The other ways to run experts have shapes that depend on values, or kernels for some dtypes.
    for chosen in run_experts_as(fake, "batched_mm"):
        notes.append(f"experts are captured as batched_mm; the model's own choice is {chosen}")
    return tuple(notes)


@dataclass(frozen=True)
class ExampleInputs:
    """Example inputs as a flat list of tensors. `rebuild(tensors)` gives the keyword arguments,
    with everything that is no tensor as a constant of the capture. loss_fn: what computes the loss
    outside of the model. fixed: values of the tensors that are constants, too, by path."""

    infos: tuple[InputInfo, ...]
    tensors: tuple[torch.Tensor, ...]
    rebuild: Callable[[Sequence[torch.Tensor]], dict[str, Any]]
    loss_fn: LossFunction | None = None
    fixed: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def call(self, model: nn.Module, tensors: Sequence[torch.Tensor]) -> Any:
        """What the model returns for these tensors."""
        return call_model(model, self.rebuild(tensors), self.loss_fn)


def flatten_inputs(
    example_inputs: Mapping[str, Any],
    mode: FakeTensorMode,
    precision: Precision = "model",
    loss_fn: LossFunction | None = None,
    fixed_names: Collection[str] = (),
) -> ExampleInputs:
    """Name every tensor of nested containers by its path ("images.0").

    Floats come in the dtype of `precision`. A tensor that is passed twice counts as two inputs.
    fixed_names: inputs that are constants (meshfold.capture.known_values.fixed_inputs).
    Raises OptionError if there is none.
    """
    infos: list[InputInfo] = []
    tensors: list[torch.Tensor] = []
    fixed = fixed_inputs(example_inputs, fixed_names)

    def strip(path: str, value: Any) -> Any:
        if path in fixed:
            return fixed[path]
        if not isinstance(value, torch.Tensor):
            return value
        _refuse_layout(value, f"the input {path}")
        dtype = narrow_dtype(value.dtype, precision)
        infos.append(InputInfo(path, tuple(value.shape), dtype_name(dtype)))
        tensors.append(fake_like(value.detach(), mode, dtype).requires_grad_(value.requires_grad))
        return TensorSlot(len(tensors) - 1)

    template = map_named(strip, dict(example_inputs))
    if not tensors:
        raise OptionError("example_inputs holds no tensor; pass a batch as keyword arguments")
    rebuild = partial(_filled, template)
    return ExampleInputs(tuple(infos), tuple(tensors), rebuild, loss_fn, fixed)


def _filled(template: Any, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    """`template` with `tensors` in its slots, and fixed ones as tensors that may be written to."""
    copied = map_leaves(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, template)
    filled: dict[str, Any] = fill_slots(copied, tensors)
    return filled
