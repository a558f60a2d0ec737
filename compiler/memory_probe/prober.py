"""Probe an op's memory by running it, forward and backward, on tensors without storage.

Autograd's own saved-tensor hooks say what is kept, storage identity says what is a view, and a
counter of the storages that ops make says what else is alive. Nothing is allocated, and no table of
ops has to be maintained. Meta tensors answer several times faster than fake ones, but what picks a
kernel by device takes another one for them: DEVICE_OPS are run on fakes, which live on the CPU.
What a CUDA-only kernel keeps may differ (the fused attention kernels do, by a few bytes of random
state). Recurrences are probed step by step (recurrence.py): fused ones keep other workspaces.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import meshfold.ops.collective_matmul  # noqa: F401  defines the ops
import meshfold.ops.ring_attention  # noqa: F401  defines the op
from meshfold.cost_models.memory.op_memory import (
    NEW_STORAGE,
    NO_GRADIENT,
    OpProbe,
    ProbedOutput,
    ProbeKey,
    TensorSpec,
)
from meshfold.errors import CaptureError
from meshfold.ir.custom_ops import OfShapes
from meshfold.ir.op_graph import Arg, Hole, Ref, Symbol
from meshfold.memory_probe.dropout import emitted_dropout
from meshfold.memory_probe.linear import linear_at_size, linear_samples
from meshfold.memory_probe.pointwise import at_size, pointwise_sample
from meshfold.memory_probe.recurrence import at_length, recurrence_samples
from meshfold.ops.expert_linear import expert_linear_scratch_bytes
from meshfold.ops.functions import FunctionOp
from meshfold.ops.registry import torch_target
from meshfold.torch_compat.dtypes import dtype_name, torch_constant, torch_dtype
from meshfold.torch_compat.fake_tensors import fake_mode

DEVICE_OPS = frozenset(
    {
        "aten.scaled_dot_product_attention.default",
        "meshfold.ring_attention.default",
        "aten.mish.default",
        "aten._native_batch_norm_legit_no_training.default",
        "meshfold.embedding_bag.default",
    }
)

WORST_SCRATCH = {"meshfold.expert_linear.default": expert_linear_scratch_bytes}
"""Ops that hold more inside, depending on values, than tensors without storage tell: the most they
may hold forward and backward, of their operands."""

TRAINED_BATCH_NORM = "aten._native_batch_norm_legit_functional.default"


class OpProber:
    """Answers ProbeKeys; every distinct key is run once, a pointwise op once and a linear layer
    twice for all sizes, a recurrence three times for all lengths."""

    def __init__(self) -> None:
        self._known: dict[ProbeKey, OpProbe] = {}
        self._is_linear: dict[ProbeKey, bool] = {}
        """Whether the first sample of a linear layer tells what the second is."""
        self._mode = fake_mode()

    def __call__(self, key: ProbeKey) -> OpProbe:
        """Raises UnsupportedOpError if this torch has no such op."""
        if key not in self._known:
            self._known[key] = self._from_samples(key) or self._probe(key)
        return self._known[key]

    def _from_samples(self, key: ProbeKey) -> OpProbe | None:
        """The answer to `key` from that to the same call at another size, if it tells."""
        if (sample := pointwise_sample(key)) is not None:
            return at_size(self(sample), key)
        if (lengths := recurrence_samples(key)) is not None:
            return at_length(tuple(map(self, lengths)), key)
        if (samples := linear_samples(key)) is None:
            return None
        first, second = samples
        if first not in self._is_linear:
            self._is_linear[first] = linear_at_size(self(first), second) == self(second)
        return linear_at_size(self(first), key) if self._is_linear[first] else None

    def _probe(self, key: ProbeKey) -> OpProbe:
        if key.custom is not None:
            with self._mode:
                return _run_custom(key, key.custom.costs.saved_bytes)
        if _has_one_value_a_channel(key):
            # Without data, torch divides by the number of values less one. These are few bytes.
            return _run(key, torch.device("cpu"))
        if key.target not in DEVICE_OPS:
            return _run(key, torch.device("meta"))
        with self._mode:
            return _run(key, torch.device("cpu"))


def _has_one_value_a_channel(key: ProbeKey) -> bool:
    """Whether a rank has one sample of a 1 x 1 map; all ranks together have more."""
    if key.target != TRAINED_BATCH_NORM:
        return False
    shape = key.operands[0].shape
    return math.prod(shape) == shape[1]


def _run(key: ProbeKey, device: torch.device) -> OpProbe:
    run = _Run(key, device)
    try:
        run.forward()
        run.backward()
    except NotImplementedError as error:
        raise CaptureError(
            f"{key.target} has no form without values, by which a plan counts its memory; write it "
            "with ordinary ops",
            op=key.target,
        ) from error
    found = run.result()
    scratch_bytes = WORST_SCRATCH.get(key.target)
    if scratch_bytes is None:
        return found
    forward_bytes, backward_bytes = scratch_bytes(*run.operands)
    return replace(
        found, forward_scratch_bytes=forward_bytes, backward_scratch_bytes=backward_bytes
    )


def _run_custom(key: ProbeKey, saved_bytes: OfShapes | None) -> OpProbe:
    """An op of the user's: its backward may look at values, or launch a kernel, which only real
    tensors have. Then a new gradient is taken for every operand that wants one."""
    run = _Run(key, torch.device("cpu"))
    run.forward()
    try:
        run.backward()
    except Exception:
        run.gradients = [torch.empty_like(t) if t.requires_grad else None for t in run.operands]
    found = run.result()
    if saved_bytes is None:
        return found
    stated = int(saved_bytes(*(spec.shape for spec in key.operands)))
    return replace(found, saved_operands=(), saved_outputs=(), saved_bytes=stated)


def _empty(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    dtype = torch_dtype(spec.dtype)
    tensor = torch.empty_strided(spec.shape, spec.strides, dtype=dtype, device=device)
    return tensor.requires_grad_(spec.requires_grad)


class StorageCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the storages made by the ops run inside, now and at the worst moment. Works on fake
    and on real tensors; storages of `known` tensors are not counted."""

    def __init__(self, known: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current_bytes = 0
        self.peak_bytes = 0
        self._seen = {storage_id(t) for t in known}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor)
        return out

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage_id(tensor)
        if key in self._seen:
            return
        self._seen.add(key)
        self.current_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)
        weakref.finalize(storage, self._forget, key, storage.nbytes()).atexit = False

    def _forget(self, key: int, num_bytes: int) -> None:
        self._seen.discard(key)
        self.current_bytes -= num_bytes


def storage_id(tensor: torch.Tensor) -> int:
    """The same for tensors on one storage, while any of them lives."""
    return int(tensor.untyped_storage()._cdata)


class _Run:
    """One op on operands without storage: run it, then ask what it holds."""

    def __init__(self, key: ProbeKey, device: torch.device) -> None:
        self.key = key
        self.device = device
        self.operands = [_empty(spec, device) for spec in key.operands]
        self.outputs: list[torch.Tensor] = []
        self.kept: dict[int, torch.Tensor] = {}
        """What autograd keeps, one tensor per storage, by storage id."""
        self.forward_peak_bytes = 0
        self.left_bytes = 0
        """Of storages that a Function made and that outlive its forward: results, what it saved,
        what it put on its context without telling autograd."""
        self.gradients: list[torch.Tensor | None] = [None] * len(self.operands)
        self.incoming: list[torch.Tensor | None] = []
        self.backward_scratch_bytes = 0

    def forward(self) -> None:
        counter = StorageCounter(self.operands)
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t), counter:
            args = [self._real(a) for a in self.key.args]
            kwargs = {name: self._real(a) for name, a in self.key.kwargs}
            result = self._function()(*args, **kwargs)
        parts = [result] if isinstance(result, torch.Tensor) else list(result)
        self.outputs = [t for t in parts if isinstance(t, torch.Tensor)]
        self.forward_peak_bytes = counter.peak_bytes
        if self.key.custom is not None and self.key.custom.function is not None:
            self.left_bytes = counter.current_bytes

    def _function(self) -> Callable[..., Any]:
        known = self.key.custom.function if self.key.custom else None
        if isinstance(known, FunctionOp):
            return known.tensors_without_storage
        emitted = emitted_dropout(self.key.target, self.device)
        return emitted or torch_target(self.key.target)

    def backward(self) -> None:
        wanted = [k for k, t in enumerate(self.operands) if t.requires_grad]
        made = [t for t in self.outputs if t.requires_grad]
        self.incoming = [torch.empty_like(t) if t.requires_grad else None for t in self.outputs]
        if not (wanted and made):
            return
        given = [g for g in self.incoming if g is not None]
        counter = StorageCounter([*self.operands, *self.outputs, *self.kept.values(), *given])
        try:
            with counter:
                found = torch.autograd.grad(
                    made, [self.operands[k] for k in wanted], given, allow_unused=True
                )
        except RuntimeError as error:
            # Gradients inside of forward have backwards that torch cannot go back through again;
            # nothing does, or the model by itself would fail.
            if "derivative for" not in str(error):
                raise
            return
        for k, gradient in zip(wanted, found, strict=True):
            self.gradients[k] = gradient
        fresh = self._fresh()
        self.backward_scratch_bytes = max(0, counter.peak_bytes - sum(fresh.values()))

    def result(self) -> OpProbe:
        operand_ids = [storage_id(t) for t in self.operands]
        output_ids = [storage_id(t) for t in self.outputs]
        outputs = tuple(
            self._output(t, operand_ids, output_ids[:j]) for j, t in enumerate(self.outputs)
        )
        internal = sum(
            t.untyped_storage().nbytes()
            for s, t in self.kept.items()
            if s not in operand_ids and s not in output_ids
        )
        output_bytes = sum(o.num_bytes for o in outputs)
        internal = max(internal, self.left_bytes - output_bytes)
        made_bytes = output_bytes + internal
        incoming_ids = [storage_id(g) if g is not None else 0 for g in self.incoming]
        fresh = self._fresh()
        sources = [*incoming_ids, *fresh]
        return OpProbe(
            outputs=outputs,
            saved_operands=tuple(k for k, s in enumerate(operand_ids) if s in self.kept),
            saved_outputs=tuple(
                j
                for j, s in enumerate(output_ids)
                if s in self.kept and outputs[j].storage == NEW_STORAGE
            ),
            saved_bytes=internal,
            forward_scratch_bytes=max(0, self.forward_peak_bytes - made_bytes),
            gradients=tuple(
                NO_GRADIENT if g is None else sources.index(storage_id(g)) for g in self.gradients
            ),
            fresh_gradient_bytes=tuple(fresh.values()),
            backward_scratch_bytes=self.backward_scratch_bytes,
        )

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        # Detached: an output that is kept would hold its own graph alive.
        detached = tensor.detach()
        self.kept[storage_id(tensor)] = detached
        return detached

    def _real(self, arg: Arg) -> Any:
        if isinstance(arg, Ref):
            return self.operands[arg.index]
        if isinstance(arg, Symbol):
            return torch_constant(arg, self.device)
        assert not isinstance(arg, Hole), "a probe key has values, not holes"
        return [self._real(a) for a in arg] if isinstance(arg, tuple) else arg

    def _output(
        self, tensor: torch.Tensor, operand_ids: list[int], earlier: list[int]
    ) -> ProbedOutput:
        spec = TensorSpec(
            tuple(tensor.shape), tensor.stride(), dtype_name(tensor.dtype), tensor.requires_grad
        )
        own = storage_id(tensor)
        if own in operand_ids:
            return ProbedOutput(spec, operand_ids.index(own), 0)
        size = 0 if own in earlier else tensor.untyped_storage().nbytes()
        return ProbedOutput(spec, NEW_STORAGE, size)

    def _fresh(self) -> dict[int, int]:
        """Storages of gradients that are no incoming one: id -> bytes."""
        given = {storage_id(g) for g in self.incoming if g is not None}
        return {
            storage_id(g): g.untyped_storage().nbytes()
            for g in self.gradients
            if g is not None and storage_id(g) not in given
        }
