"""One-op graphs, and the check of a rule: the emitted local op on simulated ranks against the whole
op, every result and every gradient."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from meshfold.codegen.emit.op import emit_op
from meshfold.codegen.emit.op_context import OpContext
from meshfold.distributed.rank_mesh import RankMesh
from meshfold.distributed.step_context import StepContext
from meshfold.ir.mesh import Mesh, MeshAxis
from meshfold.ir.op_graph import Arg, Op, OpGraph, Ref, Slot, SlotKind, Value
from meshfold.ir.strategy import OpTyping
from meshfold.ops.ctc_loss import CTC_LOSS
from meshfold.ops.registry import torch_target
from meshfold.passes.rules.ops.recurrence import RECURRENCES
from meshfold.passes.rules.ops.shards import Divisions
from meshfold.passes.rules.table import AxisRule, typing_of
from meshfold.torch_compat.dtypes import dtype_name, symbol
from support.graphs.layouts import assert_close, cut, gradient_layout, put_together
from support.graphs.rules import is_legal_typing, rules_of_op
from support.processes.ranks import run_on_simulated_ranks

BLOCKS = (1, 2, 3, 4)

UNITS = (1, 4)
"""Sizes of the units of padded shards."""

BEYOND = 0.75
"""What padding of operands holds: of no consequence to any result."""


def mesh_of(*sizes: int) -> Mesh:
    names = ("dp", "tp", "cp")
    return Mesh(tuple(MeshAxis(name, n) for name, n in zip(names, sizes, strict=False)))


class SingleOp:
    """A graph of one op. Every tensor among the arguments is a slot of its own, floats that require
    gradients included; `tensors` holds their values in op.operands order."""

    def __init__(self, target: str, *args: Any, **kwargs: Any) -> None:
        self.target = target
        self.tensors: list[Tensor] = []
        real_args = tuple(self._arg(a) for a in args)
        real_kwargs = tuple((k, self._arg(a)) for k, a in kwargs.items())
        outputs = _flat(torch_target(target)(*args, **kwargs))
        first = len(self.tensors)
        op = Op(target, real_args, real_kwargs, tuple(range(first, first + len(outputs))))
        values = tuple(
            Value(tuple(t.shape), dtype_name(t.dtype), t.requires_grad)
            for t in (*self.tensors, *outputs)
        )
        slots = tuple(Slot(SlotKind.VALUE) for _ in self.tensors)
        self.graph = OpGraph(slots, values, (op,), op.outputs)

    def _arg(self, a: Any) -> Arg:
        if isinstance(a, Tensor):
            self.tensors.append(a)
            return Ref(len(self.tensors) - 1)
        if isinstance(a, list | tuple):
            return tuple(self._arg(x) for x in a)
        if isinstance(a, torch.dtype | torch.device | torch.layout | torch.memory_format):
            return symbol(a)
        assert a is None or isinstance(a, int | float | bool | str)
        return a

    def axis_rules(self, size: int) -> tuple[AxisRule, ...]:
        """Every rule at every place with up to 4 blocks, and padded with units of some sizes,
        whatever other ops would ask for."""
        divides = Divisions(size)
        candidates = tuple(
            frozenset(
                (d, g, units)
                for d, extent in enumerate(value.shape)
                for g in BLOCKS
                for units in (0, *_units(extent, g))
                if extent and (units or divides(extent, g))
            )
            for value in self.graph.values
        )
        return rules_of_op(self.graph, 0, size, candidates)

    def typings(self, *sizes: int) -> list[OpTyping]:
        """All legal typings on axes of `sizes`."""
        joint: list[tuple[AxisRule, ...]] = [()]
        for size in sizes:
            joint = [(*rules, rule) for rules in joint for rule in self.axis_rules(size)]
        typings = [typing_of(self.graph, 0, rules) for rules in joint]
        return [t for t in typings if is_legal_typing(self.graph, 0, t, sizes)]

    def emitted(self, typing: OpTyping, mesh: Mesh) -> fx.GraphModule:
        """StepContext, operands -> list of outputs."""
        graph = fx.Graph()
        context_node = graph.placeholder("context")
        operands = [graph.placeholder(f"x{k}") for k in range(len(self.tensors))]
        context = OpContext(graph, context_node, self.graph, 0, typing, operands, mesh, 0)
        graph.output(emit_op(context))
        return fx.GraphModule({}, graph)

    @cached_property
    def on_one_rank(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Random cotangents of the outputs; the outputs; gradients of the operands."""
        generator = torch.Generator().manual_seed(1)
        outputs = self.graph.values[len(self.tensors) :]
        cotangents = [_random(v, generator) for v in outputs]
        try:
            return cotangents, *run_whole(self, cotangents)
        except RuntimeError as error:
            if "derivative for" in str(error):
                pytest.skip(f"torch {torch.__version__}: {error}")
            raise


def _units(extent: int, blocks: int) -> list[int]:
    """Units per block of a dim, if they are of these sizes."""
    return [extent // (blocks * unit) for unit in UNITS if extent % (blocks * unit) == 0]


def _flat(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, list | tuple) else [result]


def whole_typing(op: SingleOp, num_axes: int) -> OpTyping:
    rules = op.axis_rules(1)
    return typing_of(op.graph, 0, (rules[0],) * num_axes)


def run_whole(op: SingleOp, cotangents: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Results and gradients of the op on one rank."""
    mesh = mesh_of(1)
    module = op.emitted(whole_typing(op, 1), mesh)
    (result,) = run_on_simulated_ranks(
        mesh, lambda rank_mesh: _run(module, rank_mesh, op, op.tensors, cotangents)
    )
    return result


def check_typings(op: SingleOp, mesh: Mesh, typings: Sequence[OpTyping]) -> None:
    """Raises AssertionError, naming the typing, unless each computes what the unsharded op
    computes."""
    generator = torch.Generator().manual_seed(2)
    cotangents, expected, expected_gradients = op.on_one_rank
    modules = [op.emitted(typing, mesh) for typing in typings]
    locals_ = [
        [
            cut(t.detach(), y, mesh, generator, beyond=BEYOND)
            for t, y in zip(op.tensors, typing.inputs, strict=True)
        ]
        for typing in typings
    ]
    for of_typing in locals_:
        _check_sizes(op, [parts[0] for parts in of_typing])
    pulled = [
        [
            cut(c, gradient_layout(y), mesh, generator)
            for c, y in zip(cotangents, typing.outputs, strict=True)
        ]
        for typing in typings
    ]

    def body(rank_mesh: RankMesh) -> list[tuple[list[Tensor], list[Tensor]]]:
        r = rank_mesh.rank
        return [
            _run(modules[k], rank_mesh, op, [t[r] for t in locals_[k]], [c[r] for c in pulled[k]])
            for k in range(len(typings))
        ]

    results = run_on_simulated_ranks(mesh, body)
    for k, typing in enumerate(typings):
        try:
            for i, whole in enumerate(expected):
                parts = [r[k][0][i] for r in results]
                assert_close(put_together(parts, whole.shape, typing.outputs[i], mesh), whole)
            for i, whole in enumerate(expected_gradients):
                parts = [r[k][1][i] for r in results]
                layout = gradient_layout(typing.inputs[i])
                found = put_together(parts, whole.shape, layout, mesh, zeros_beyond=True)
                assert_close(found, whole)
        except AssertionError as error:
            types = " ".join(map(str, typing.inputs)), " ".join(map(str, typing.outputs))
            raise AssertionError(f"{op.target} rule {typing.rules} {types}: {error}") from error


def _check_sizes(op: SingleOp, operands: Sequence[Tensor]) -> None:
    """Some kernels of torch take the sizes of their other operands on trust, and read behind the
    end of one that is too short."""
    if not operands:
        return
    first, *others = (t.shape for t in operands)
    if "batch_norm" in op.target:
        assert all(shape == first[1:2] for shape in others), "sizes of channels differ"
    if "weight_norm" in op.target:
        pairs = zip(others[0], first, strict=True)
        assert all(norms in (1, size) for norms, size in pairs), "sizes of norms differ"
    if op.target == CTC_LOSS:
        num_steps, _, num_classes = op.tensors[0].shape
        assert (first[0], first[2]) == (num_steps, num_classes), "sizes of the alphabet differ"
        assert {own[0] for own in others} == {first[1]}, "sizes of the batch differ"
        assert others[0][1] == op.tensors[1].shape[1], "sizes of the targets differ"
    if op.target in RECURRENCES:
        full = [t.shape for t in op.tensors[1:]]
        states = [own for own in others if len(own) == 3]
        pairs = zip(others, full, strict=True)
        assert all(a[::2] == b[::2] if len(b) == 3 else a == b for a, b in pairs), "sizes differ"
        assert {own[1] for own in states} <= {*first[:2]}, "sizes of the batch differ"
        assert len({own[1] for own in states}) == 1, "sizes of the batch differ"
    if "attention" in op.target:
        key, value, *mask = others
        assert key[:-1] == value[:-1] and key[-1] == first[-1], "sizes of key and value differ"
        assert key[0] == first[0], "sizes of the batch differ"
        num_keys = op.tensors[1].shape[-2]
        for scores in mask:
            pairs = zip(scores[::-1], (num_keys, *first[-2::-1]), strict=False)
            assert all(n in (1, size) for n, size in pairs), "sizes of the mask differ"


def _run(
    module: fx.GraphModule,
    rank_mesh: RankMesh,
    op: SingleOp,
    operands: Sequence[Tensor],
    cotangents: Sequence[Tensor],
) -> tuple[list[Tensor], list[Tensor]]:
    wanted = [v.requires_grad for v in op.graph.values]
    leaves = [t.detach().clone().requires_grad_(w) for t, w in zip(operands, wanted, strict=False)]
    outputs: list[Tensor] = module(StepContext(rank_mesh), *leaves)
    sources = [x for x in leaves if x.requires_grad]
    gradients: list[Tensor] = []
    pairs = [
        (y, c)
        for y, c, w in zip(outputs, cotangents, wanted[len(leaves) :], strict=True)
        if w and y.requires_grad
    ]
    if sources and pairs:
        found = torch.autograd.grad(
            [y for y, _ in pairs], sources, [c for _, c in pairs], allow_unused=True
        )
        by_leaf = dict(zip(map(id, sources), found, strict=True))
        gradients = [
            torch.zeros_like(x) if by_leaf.get(id(x)) is None else by_leaf[id(x)] for x in leaves
        ]
    return [y.detach() for y in outputs], gradients


def _random(value: Value, generator: torch.Generator) -> Tensor:
    dtype = torch.complex128 if value.dtype == "complex128" else torch.float64
    return torch.randn(value.shape, generator=generator, dtype=dtype)
