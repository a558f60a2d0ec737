"""Probes of ops of the user's code: on small random tensors, alone and as ranks would run them.

A label is on dims of operands and results. With the op as f and its backward as g, on two ranks:

    operands with the label in shards, others whole      f of each rank
    results with the label        joined, the same as of the whole op
    results without it            added up, the same
    gradients of operands         joined where they have the label, added up where they do not: the
                                  same, for random gradients of the results

That is what the rule of the label says (passes/rules/table.py). Random numbers do not prove an
equation for all numbers, but what mixes samples shows in them. In float64; ops that narrow to
float32 inside are held to what that leaves.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from meshfold.ir.custom_ops import DimNames
from meshfold.ir.op_graph import Arg, Op, OpGraph, Ref, Value
from meshfold.ops.reference_interpreter import argument
from meshfold.ops.registry import op_function
from meshfold.torch_compat.dtypes import torch_dtype
from meshfold.torch_compat.fake_tensors import fake_mode

TOLERANCE = 1e-5
"""Relative to the largest number; what mixes samples is off by about 1."""

MOST_ELEMENTS = 1 << 18
"""Of all operands, on which an op is tried at its own size."""
MOST_OF_ONE_LABEL = 1 << 22
"""The same where only the dims of the label are made small."""
KEPT_SIZE = 8
"""Dims up to this size stay as they are: heads, groups, channels of an image."""

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Call:
    """One call of an op. Ref(k) in args and kwargs is operand k."""

    function: Callable[..., Any]
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    operands: tuple[Value, ...]
    results: tuple[Value, ...]


@dataclass(frozen=True)
class Labels:
    """Names on the dims of operands and results; "" for none."""

    operands: tuple[DimNames, ...]
    results: tuple[DimNames, ...]


class CannotRunError(Exception):
    """The op raises on every size that is tried. The text says what."""


def call_of(graph: OpGraph, op: Op) -> Call:
    """A call as it stands in a graph."""
    count = iter(range(len(op.operands)))

    def numbered(arg: Arg) -> Arg:
        if isinstance(arg, Ref):
            return Ref(next(count))
        return tuple(map(numbered, arg)) if isinstance(arg, tuple) else arg

    return Call(
        op_function(op),
        tuple(map(numbered, op.args)),
        tuple((name, numbered(arg)) for name, arg in op.kwargs),
        tuple(graph.values[v] for v in op.operands),
        tuple(graph.values[v] for v in op.outputs),
    )


def without_storage(call: Call) -> None:
    """Run a call, forward and backward, on tensors without storage."""
    with fake_mode():
        _Probe(call).step()


def difference(call: Call, labels: Labels, label: str, *, is_claimed: bool = False) -> str:
    """What two ranks that share `label` compute otherwise than one, "" if nothing.

    is_claimed: the label is a claim of the user's, and ranks have halves. Else the one has a single
    entry, so that nothing holds for shares of some sizes only.

    Raises CannotRunError.
    """
    raised = ""
    for operands in _sizes(call, labels, label):
        probe = _Probe(replace(call, operands=operands))
        try:
            whole = probe.step()
        except Exception as error:
            raised = f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"
            continue
        try:
            return probe.difference(whole, labels, label, is_claimed)
        except Exception as error:
            return f"a shard of {label} raises {type(error).__name__}"
    raise CannotRunError(raised or f"no size is small enough to share {label}")


def is_linear(call: Call) -> bool:
    """Whether gradients of operands are linear in those of the results."""
    for operands in _sizes(call, Labels((), ()), ""):
        probe = _Probe(replace(call, operands=operands))
        try:
            whole = probe.step()
            some = [probe.random_like(g) for g in whole.incoming]
            rest = [g - s for g, s in zip(whole.incoming, some, strict=True)]
            summands = [probe.step(incoming=g).gradients for g in (some, rest)]
        except Exception:
            continue
        sums = [a + b for a, b in zip(*summands, strict=True)]
        return _first_other(sums, whole.gradients) is None
    return False


def draws(call: Call) -> bool:
    """Whether results change with torch's generator, as far as the op runs here."""
    for operands in _sizes(call, Labels((), ()), ""):
        probe = _Probe(replace(call, operands=operands))
        try:
            first, second = (probe.step(seed=seed).results for seed in (1, 2))
        except Exception:
            continue
        return _first_other(first, second) is not None
    return False


@dataclass(frozen=True)
class _Step:
    """What one forward and backward gives. trained: numbers of the results that have a gradient;
    incoming: these."""

    results: list[Tensor]
    trained: list[int]
    incoming: list[Tensor]
    gradients: list[Tensor]
    """Of the operands that want one; zeros for None."""


class _Probe:
    """An op on random operands."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.random = torch.Generator().manual_seed(0)
        self.tensors = [self._random(v.shape, torch_dtype(v.dtype)) for v in call.operands]

    def _random(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if dtype.is_complex:
            return torch.randn(tuple(shape), generator=self.random, dtype=torch.complex128)
        if dtype.is_floating_point:
            return torch.randn(tuple(shape), generator=self.random, dtype=torch.float64)
        # Indices and flags: what is valid almost anywhere.
        return torch.randint(0, 2, tuple(shape), generator=self.random).to(dtype)

    def random_like(self, x: Tensor) -> Tensor:
        return self._random(x.shape, x.dtype).to(x.dtype)

    def step(
        self,
        tensors: Sequence[Tensor] | None = None,
        incoming: Sequence[Tensor] | None = None,
        seed: int = 0,
    ) -> _Step:
        """Forward and backward on `tensors`, the probe's own by default."""
        call = self.call
        tensors = self.tensors if tensors is None else tensors
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            leaves = [
                t.clone().requires_grad_(v.requires_grad and t.is_floating_point())
                for t, v in zip(tensors, call.operands, strict=True)
            ]
            # No leaves: what an op may do to its argument depends on that.
            given = [t.view_as(t) for t in leaves]
            args = [argument(a, given, (), _CPU) for a in call.args]
            kwargs = {name: argument(a, given, (), _CPU) for name, a in call.kwargs}
            returned = call.function(*args, **kwargs)
            parts = [returned] if isinstance(returned, Tensor) else list(returned)
            results = [t for t in parts if t is not None]
            trained = [k for k, t in enumerate(results) if t.requires_grad]
            made = [results[k] for k in trained]
            wanted = [t for t in leaves if t.requires_grad]
            if incoming is None:
                incoming = [self.random_like(t) for t in made]
            found: Sequence[Tensor | None] = [None] * len(wanted)
            if made and wanted:
                found = torch.autograd.grad(made, wanted, list(incoming), allow_unused=True)
        gradients = [
            torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True)
        ]
        return _Step([t.detach() for t in results], trained, list(incoming), gradients)

    def difference(self, whole: _Step, labels: Labels, label: str, is_claimed: bool) -> str:
        """See `difference`."""
        dims = [_dim(names, label) for names in labels.operands]
        out_dims = [_dim(names, label) for names in labels.results]
        wanted = [d for d, v in zip(dims, self.call.operands, strict=True) if v.requires_grad]
        size = next(t.shape[d] for t, d in zip(self.tensors, dims, strict=True) if d is not None)
        results, gradients = [], []
        first = max(1, size // 2) if is_claimed else 1
        for part in ((0, first), (first, size)):
            local = [_part(t, d, *part) for t, d in zip(self.tensors, dims, strict=True)]
            pairs = zip(whole.incoming, whole.trained, strict=True)
            step = self.step(local, [_part(g, out_dims[k], *part) for g, k in pairs])
            results.append(step.results)
            gradients.append(step.gradients)
        found = [_joined(of, d) for of, d in zip(zip(*results, strict=True), out_dims, strict=True)]
        if (k := _first_other(found, whole.results)) is not None:
            return f"result {k} is another where ranks share {label}"
        back = [_joined(of, d) for of, d in zip(zip(*gradients, strict=True), wanted, strict=True)]
        if (k := _first_other(back, whole.gradients)) is not None:
            operands = [j for j, v in enumerate(self.call.operands) if v.requires_grad]
            return f"the gradient of operand {operands[k]} is another where ranks share {label}"
        return ""


def _dim(names: DimNames, label: str) -> int | None:
    return names.index(label) if label in names else None


def _part(x: Tensor, dim: int | None, start: int, stop: int) -> Tensor:
    return x if dim is None else x.narrow(dim, start, stop - start).contiguous()


def _joined(parts: Sequence[Tensor], dim: int | None) -> Tensor:
    if dim is not None:
        return torch.cat(list(parts), dim)
    return torch.stack(list(parts)).sum(0)


def _first_other(found: Sequence[Tensor], expected: Sequence[Tensor]) -> int | None:
    """Number of the first tensor that is another."""
    for k, (a, b) in enumerate(zip(found, expected, strict=True)):
        if a.shape != b.shape:
            return k
        if not (b.is_floating_point() or b.is_complex()):
            if not torch.equal(a.to(b.dtype), b):
                return k
            continue
        scale = max(float(b.abs().nan_to_num().max()), 1e-30) if b.numel() else 1.0
        if not torch.allclose(a.to(b.dtype), b, rtol=0, atol=TOLERANCE * scale, equal_nan=True):
            return k
    return None


def _sizes(call: Call, labels: Labels, label: str) -> Iterator[tuple[Value, ...]]:
    """Operands to try, the most telling first: as they are; with large dims small, equal ones
    alike; as they are but for the dims of the label."""
    if _num_elements(call.operands) <= MOST_ELEMENTS:
        yield call.operands
        return
    sizes = sorted({n for v in call.operands for n in v.shape if n > KEPT_SIZE})
    small = {n: KEPT_SIZE + 4 * k for k, n in enumerate(sizes)}
    yield tuple(replace(v, shape=tuple(small.get(n, n) for n in v.shape)) for v in call.operands)
    if not label:
        return
    narrow = tuple(
        replace(
            v,
            shape=tuple(4 if name == label else n for name, n in zip(names, v.shape, strict=True)),
        )
        for v, names in zip(call.operands, labels.operands, strict=True)
    )
    if _num_elements(narrow) <= MOST_OF_ONE_LABEL:
        yield narrow


def _num_elements(values: Sequence[Value]) -> int:
    return sum(math.prod(v.shape) for v in values)
