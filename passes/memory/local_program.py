"""The local program of a region: what one rank runs, as the emitter writes it.

Ops on local shapes with local constants, conversions step by step, and the tensors that the runtime
makes of parameters (gathered ones, buffers of groups). Types, conversion trees and constants come
from the tables that the emitter uses; the live ranges of the result are those of
cost_models/memory/live_ranges.py.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from meshfold.cost_models.memory.live_ranges import LocalProgram
from meshfold.cost_models.memory.op_memory import (
    NEW_STORAGE,
    NO_GRADIENT,
    OpProbe,
    ProbedOutput,
    ProbeKey,
    TensorSpec,
    dense_spec,
)
from meshfold.cost_models.memory.parameter_uses import How, ParameterUse
from meshfold.cost_models.memory.recomputation import LocalStep
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.ir.conversion_step import Step
from meshfold.ir.op_graph import ITEM_BYTES, Arg, Hole, OpGraph, Ref, SlotKind, Value
from meshfold.ir.spmd import Layout, local_shape
from meshfold.ir.strategy import SELECTIVE, KeptResults, OpTyping, RegionTyping
from meshfold.passes.graph.without_dropout import ATTENTION
from meshfold.passes.price.conversion_trees import conversion_trees
from meshfold.passes.price.conversions import axis_conversion, conversion_steps
from meshfold.passes.price.parameter_groups import changed_axes, is_unbucketed, stored_use
from meshfold.passes.price.parameters import local_bytes, stored_bytes
from meshfold.passes.rules.localize import localize
from meshfold.passes.rules.ops.attention import RING_ATTENTION, ring_call
from meshfold.passes.rules.ops.index import EMBEDDING
from meshfold.passes.rules.ops.loss import (
    CLASSES_OF_LOSSES,
    CROSS_ENTROPY,
    LINEAR_CROSS_ENTROPY,
    NARROW_CROSS_ENTROPY,
)

Probe = Callable[[ProbeKey], OpProbe]

Origin = int | tuple[int, Step]
"""What a step of a local program is: the number of an op, or (value, a step of its conversion)."""


def is_kept(origin: Origin, kept: KeptResults) -> bool:
    """Whether the backward keeps what a step gave."""
    if isinstance(origin, int):
        return origin in kept.ops
    v, step = origin
    return (v, step.after) in kept.conversions


def kept_steps(origins: Sequence[Origin], typing: RegionTyping) -> frozenset[int] | None:
    """Numbers of the steps that are kept; None where recomputation is not selective."""
    if typing.recompute not in SELECTIVE:
        return None
    return frozenset(k for k, origin in enumerate(origins) if is_kept(origin, typing.kept))


def parameter_use(
    tensor: int, value: Value, stored: Layout, used: Layout, costs: CostModel
) -> ParameterUse:
    """A parameter that ops read in another layout than it is stored in, or in another dtype.
    tensor: of the local program that stands for it."""
    sizes = costs.mesh.sizes
    here, own = local_bytes(value, stored, sizes), stored_bytes(value, stored, sizes)
    # What is gathered contains the padding of its shards.
    pairs = zip(stored, used, sizes, strict=True)
    shards = math.prod(s.num_shards(n) for s, u, n in pairs if s.is_shard and not u.is_shard)
    how: How = "gathered" if shards > 1 else "reduced" if used != stored else "cast"
    before, after, on = stored_use(stored, used, costs)
    gather, _ = changed_axes(before, after)
    return ParameterUse(
        tensor,
        own,
        shards * here,
        shards * own,
        own,
        how,
        copy_bytes=here if value.master and shards == 1 else 0,
        is_unbucketed=not value.master and is_unbucketed(value, before, gather, on),
    )


class LocalProgramBuilder:
    """Writes the local program of one region whose values arrive in the layouts `arriving`."""

    def __init__(
        self,
        graph: OpGraph,
        typing: RegionTyping,
        arriving: tuple[Layout, ...],
        costs: CostModel,
        probe: Probe,
        floats: Sequence[float],
    ) -> None:
        self.graph = graph
        self.typing = typing
        self.arriving = arriving
        self.mesh = costs.mesh
        self.costs = costs
        self.probe = probe
        self.floats = floats
        self.specs: list[TensorSpec] = []
        self.steps: list[LocalStep] = []
        self.origins: list[Origin] = []
        """What each step is."""
        self.tensors: dict[tuple[int, Layout], int] = {}
        self.parents, self._parameters = conversion_trees(graph, typing, arriving, costs)
        self.uses: dict[tuple[int, Layout], int] = {}
        """Tensors that the runtime materializes of parameters: (slot, used layout) -> tensor."""

    def build(self) -> LocalProgram:
        """The finished program."""
        for v, layout in enumerate(self.arriving):
            self.tensors[v, layout] = self._outside(v, layout)
        for v, layout in self._parameters:
            if layout != self.arriving[v] or self.graph.values[v].master:
                self.uses[v, layout] = self.tensors[v, layout] = self._outside(v, layout)
        num_slots = len(self.specs)
        for k, typing in enumerate(self.typing.ops):
            self._op(k, typing)
        outputs = tuple(
            self._tensor(v, layout)
            for v, layout in zip(self.graph.outputs, self.typing.outputs, strict=True)
        )
        for slot, v in self.graph.mutations:
            self._tensor(v, self.arriving[slot])
        bucketed = frozenset(self.uses.values())
        return LocalProgram(
            num_slots,
            tuple(self.specs),
            tuple(self.steps),
            outputs,
            bucketed,
            recomputes=self.typing.recompute != "none",
            kept=kept_steps(self.origins, self.typing),
        )

    def parameter_uses(self) -> tuple[tuple[int, ParameterUse], ...]:
        """(slot, use) of every parameter slot."""
        found = []
        for v, slot in enumerate(self.graph.slots):
            if slot.kind is not SlotKind.PARAMETER:
                continue
            value = self.graph.values[v]
            runtime = [(layout, t) for (w, layout), t in self.uses.items() if w == v]
            for layout, t in runtime:
                found.append((v, parameter_use(t, value, self.arriving[v], layout, self.costs)))
            if not runtime:
                here = local_bytes(value, self.arriving[v], self.mesh.sizes)
                stored = stored_bytes(value, self.arriving[v], self.mesh.sizes)
                use = ParameterUse(v, stored, here, stored, stored, "direct")
                found.append((v, replace(use, adds_in_place=self._makes_own_gradient(v))))
        return tuple(found)

    def _makes_own_gradient(self, v: int) -> bool:
        """Whether all that reads a parameter makes its gradient as a chunked loss does: a linear
        layer gives a transposed view (both measured, with the allocator's events)."""
        readers = [o for s, o in zip(self.steps, self.origins, strict=True) if v in s.operands]
        return all(
            isinstance(o, int) and self.graph.ops[o].target == LINEAR_CROSS_ENTROPY for o in readers
        )

    # Tensors and steps, in the order in which they are computed.

    def _outside(self, v: int, layout: Layout) -> int:
        value = self.graph.values[v]
        shape = local_shape(value.shape, layout, self.mesh.sizes)
        return self._add(dense_spec(shape, value.dtype, value.requires_grad))

    def _add(self, spec: TensorSpec) -> int:
        self.specs.append(spec)
        return len(self.specs) - 1

    def _op(self, k: int, typing: OpTyping) -> None:
        op = self.graph.ops[k]
        operands = tuple(
            self._tensor(v, layout) for v, layout in zip(op.operands, typing.inputs, strict=True)
        )
        args, kwargs = localize(self.graph, k, typing, self.mesh.sizes)
        count = iter(range(len(operands)))
        key = ProbeKey(
            _as_runs(op.target, typing),
            tuple(self._bound(a, count) for a in args),
            tuple((name, self._bound(a, count)) for name, a in kwargs),
            _as_kernels_get_them(op.target, tuple(self.specs[t] for t in operands)),
            op.custom,
        )
        if (call := ring_call(op, typing.rules, self.mesh.sizes)) is not None:
            key = ProbeKey(RING_ATTENTION, call, (), key.operands)
        answer = _of_shards(self.probe(key), key, typing)
        outputs = tuple(self._add(o.spec) for o in answer.outputs)
        self.steps.append(LocalStep(operands, outputs, answer))
        self.origins.append(k)
        for v, layout, t in zip(op.outputs, typing.outputs, outputs, strict=True):
            self.tensors[v, layout] = t

    def _bound(self, arg: Arg, count: Iterator[int]) -> Arg:
        """References by operand position, holes filled."""
        if isinstance(arg, Ref):
            return Ref(next(count))
        if isinstance(arg, Hole):
            return self.floats[arg.index]
        return tuple(self._bound(a, count) for a in arg) if isinstance(arg, tuple) else arg

    def _tensor(self, v: int, layout: Layout) -> int:
        if (v, layout) not in self.tensors:
            source = self.parents[v, layout]
            t = self._tensor(v, source)
            value = self.graph.values[v]
            for step in conversion_steps(value, source, layout, self.costs):
                t = self._convert(t, step)
                self.origins.append((v, step))
            self.tensors[v, layout] = t
        return self.tensors[v, layout]

    def _convert(self, t: int, step: Step) -> int:
        """One step of a conversion on tensor t."""
        sizes = self.mesh.sizes
        before = self.specs[t]
        shape = list(before.shape)
        if step.source.is_shard:
            shape[step.source.dim] *= sizes[step.axis]
        if step.target.is_shard:
            shape = [*local_shape(shape, (step.target,), (sizes[step.axis],))]
        after = dense_spec(tuple(shape), before.dtype, before.requires_grad)
        new = self._add(after)
        probe = conversion_probe(step, sizes, before, after)
        self.steps.append(LocalStep((t,), (new,), probe))
        return new


def _as_runs(target: str, typing: OpTyping) -> str:
    """The op that a rank runs: classes that are sharded have a loss of their own."""
    if target != CROSS_ENTROPY:
        return target
    logits, dim, _ = CLASSES_OF_LOSSES[target]
    is_sharded = any(t.is_shard and t.dim == dim for t in typing.inputs[logits])
    return NARROW_CROSS_ENTROPY if is_sharded else target


def _of_shards(answer: OpProbe, key: ProbeKey, typing: OpTyping) -> OpProbe:
    """What a rank keeps of a lookup of rows that are sharded: the numbers that indices have among
    its own rows, and which are its own (meshfold.ops.local_implementations.embedding)."""
    if key.target != EMBEDDING or not any(t.is_shard and t.dim == 0 for t in typing.inputs[0]):
        return answer
    ids = key.operands[1]
    kept = tuple(k for k in answer.saved_operands if k != 1)
    is_local_bytes = ids.num_bytes // ITEM_BYTES[ids.dtype]
    return replace(
        answer,
        saved_operands=kept,
        saved_bytes=answer.saved_bytes + ids.num_bytes + is_local_bytes,
        forward_scratch_bytes=answer.forward_scratch_bytes + answer.outputs[0].num_bytes,
    )


def _as_kernels_get_them(target: str, specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """Operands of an op, where what a rank's kernel computes on is not what the rank has."""
    if target == ATTENTION:
        return _with_picked_heads(specs)
    if target not in CLASSES_OF_LOSSES:
        return specs
    # Class weights, the last operand, are unsharded; a rank of a sharded vocabulary applies those
    # of its own classes (meshfold.ops.fused.class_losses).
    operand, dim, fewest = CLASSES_OF_LOSSES[target]
    if len(specs) == fewest:
        return specs
    *others, weight = specs
    classes = (specs[operand].shape[dim],)
    return (*others, dense_spec(classes, weight.dtype, weight.requires_grad))


def _with_picked_heads(specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """Operands of attention: a rank whose query heads are no multiple of the key heads picks a key
    and a value head for each of them (meshfold.ops.local_implementations.attention)."""
    if len(specs[0].shape) < 4:
        return specs
    query, key, value, *mask = specs
    heads = query.shape[-3]
    if heads % key.shape[-3] == 0:
        return specs
    picked = (
        dense_spec((*x.shape[:-3], heads, *x.shape[-2:]), x.dtype, x.requires_grad)
        for x in (key, value)
    )
    return (query, *picked, *mask)


def conversion_probe(
    step: Step, sizes: Sequence[int], before: TensorSpec, after: TensorSpec
) -> OpProbe:
    """The memory that one step of a conversion takes, known without running it. It saves nothing.
    What communicates or slices makes a new tensor, and also a copy of the larger end where shards
    of an inner dim are stacked, or where it is padded."""
    size = sizes[step.axis]
    there = back = "none"
    if size > 1:
        conversion = axis_conversion(step.source, step.target, size)
        there, back = conversion.forward, conversion.backward
    inner = any(
        t.is_shard and (t.padded or t.blocks > 1 or math.prod(before.shape[: t.dim]) > 1)
        for t in (step.source, step.target)
    )
    scratch = max(before.num_bytes, after.num_bytes) if inner else 0
    stacked = {"all_gather", "reduce_scatter", "all_to_all"}
    makes = there != "none"
    output = ProbedOutput(after, NEW_STORAGE if makes else 0, after.num_bytes if makes else 0)
    if not before.requires_grad:
        gradients: tuple[int, ...] = (NO_GRADIENT,)
    else:
        gradients = (0,) if back == "none" else (1,)
    return OpProbe(
        outputs=(output,),
        forward_scratch_bytes=scratch if there in stacked or step.target.padded else 0,
        gradients=gradients,
        fresh_gradient_bytes=(before.num_bytes,) if gradients == (1,) else (),
        backward_scratch_bytes=scratch if back in stacked and gradients == (1,) else 0,
    )
