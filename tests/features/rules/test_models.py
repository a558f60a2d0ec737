"""The gate on real calls: every op of the six families with every rule that its region offers."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from support.graphs.ops import SingleOp, check_typings, mesh_of
from support.models.hugging_face import families, tiny_model
from torch import Tensor

from meshfold.capture.pipeline import capture
from meshfold.ir.op_graph import (
    Arg,
    Dependence,
    FoldedGraph,
    Hole,
    Instance,
    Op,
    OpGraph,
    Ref,
    Symbol,
)
from meshfold.passes.rules.table import op_labels, region_rules, typing_of
from meshfold.torch_compat.dtypes import torch_constant, torch_dtype


@cache
def captured(family: str) -> FoldedGraph:
    model, inputs = tiny_model(family, layers=1)
    return capture(model, inputs).graph


def computed(graph: OpGraph) -> Iterator[tuple[int, Op]]:
    """The ops that depend on more than constants."""
    for k, op in enumerate(graph.ops):
        if any(graph.values[v].depends is not Dependence.CONSTANT for v in op.outputs):
            yield k, op


class Arguments:
    """Random arguments of the shapes of one op of a region."""

    def __init__(self, graph: OpGraph, instance: Instance) -> None:
        self.graph = graph
        self.instance = instance
        self.generator = torch.Generator().manual_seed(0)

    def real(self, arg: Arg) -> Any:
        match arg:
            case Ref():
                return self._tensor(arg.index)
            case Hole():
                return self.instance.floats[arg.index]
            case Symbol(kind="dtype", text="float32"):
                return torch.float64  # the models compute some parts in float32: too coarse here
            case Symbol():
                return torch_constant(arg, torch.device("cpu"))
            case tuple():
                return [self.real(a) for a in arg]
        return arg

    def _tensor(self, index: int) -> Tensor:
        value = self.graph.values[index]
        dtype = torch_dtype(value.dtype)
        if value.is_float:
            x = 0.1 + torch.rand(value.shape, generator=self.generator, dtype=torch.float64)
            return x.requires_grad_(value.requires_grad)
        return torch.randint(0, 2, value.shape, generator=self.generator).to(dtype)


@pytest.mark.parametrize("family", families("gpt2", "llama"))
def test_every_rule_of_every_op(family: str) -> None:
    mesh, seen = mesh_of(2), set()
    for number, region in enumerate(captured(family).regions):
        graph = region.graph
        instance = next(i for i in captured(family).instances if i.region == number)
        rules = region_rules(graph, mesh.sizes)
        for k, op in computed(graph):
            arguments = Arguments(graph, instance)
            args = [arguments.real(a) for a in op.args]
            kwargs = {name: arguments.real(a) for name, a in op.kwargs}
            single = SingleOp(op.target, *args, **kwargs)
            typings = [typing_of(graph, k, (rule,)) for rule in rules[k][0]]
            key = (single.graph.ops, single.graph.values, tuple(typings))
            if key not in seen:
                seen.add(key)
                check_typings(single, mesh, typings)


@pytest.mark.parametrize("family", families("gpt2", "llama"))
def test_no_op_falls_back_to_unsharded_values(family: str) -> None:
    regions = [region.graph for region in captured(family).regions]
    missing = {op.target for g in regions for _, op in computed(g) if op_labels(g, op) is None}
    assert missing == set()
