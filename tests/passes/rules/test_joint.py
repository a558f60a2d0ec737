"""Joint rules over several axes."""

import itertools

import pytest
from support.graphs.op_graphs import GraphBuilder, mlp
from support.graphs.ops import check_typings, mesh_of
from support.graphs.samples import CONTRACTION, EXPERTS, RING, SHAPE, Sample

from meshfold.ir.op_graph import Dependence
from meshfold.ir.spmd import INVARIANT, Shard, is_legal
from meshfold.ir.strategy import OpTyping
from meshfold.passes.rules.joint import Legality, is_constant_op, op_domains
from meshfold.passes.rules.table import region_rules


def test_domain_is_the_legal_product():
    graph, sizes = mlp(batch=2, width=8, hidden=16), (2, 2)
    table = region_rules(graph, sizes)
    domains = op_domains(graph, table, Legality(sizes))
    for k, op in enumerate(graph.ops):
        joint = []
        for rules in itertools.product(*table[k]):
            layouts = [
                *(tuple(r.inputs[i] for r in rules) for i in range(len(op.operands))),
                *(tuple(r.outputs[i] for r in rules) for i in range(len(op.outputs))),
            ]
            shapes = [graph.values[v].shape for v in (*op.operands, *op.outputs)]
            if all(is_legal(s, x, sizes) for s, x in zip(shapes, layouts, strict=True)):
                joint.append(rules)
        assert list(domains[k].rules) == joint
        assert len(domains[k]) == len(joint)
    # A batch of 2 cannot be cut over both axes.
    assert (Shard(0), Shard(0)) not in domains[0].inputs[0]


def test_fixed_axis():
    graph, sizes = mlp(), (2, 2)
    domains = op_domains(
        graph, region_rules(graph, sizes), Legality(sizes), {0: ("d0", "d0", "d0")}
    )
    assert {rules[0].name for rules in domains[0].rules} == {"d0"}
    assert len({rules[1].name for rules in domains[0].rules}) > 1


def test_constant_ops_run_unsharded():
    b = GraphBuilder()
    x = b.slot(4, 8, depends=Dependence.CONSTANT)
    b.relu(x)
    b.values[-1] = b.values[x]
    graph = b.build(1)
    assert is_constant_op(graph, 0)
    (domain,) = op_domains(graph, region_rules(graph, (2,)), Legality((2,)))
    assert domain.inputs == (((INVARIANT,),),)


def test_constant_made_from_the_batch_is_no_constant_op():
    b = GraphBuilder()
    b.relu(b.slot(4, 8))
    b.values[-1] = b.values[-1].__class__((4, 8), "float32", False, Dependence.CONSTANT)
    assert not is_constant_op(b.build(1), 0)


def test_no_axes_have_one_empty_rule():
    graph = mlp()
    domains = op_domains(graph, region_rules(graph, ()), Legality(()))
    assert [d.rules for d in domains] == [((),)] * 3


@pytest.mark.parametrize("sample", [*RING, *EXPERTS, *CONTRACTION, *SHAPE], ids=lambda s: s[0])
def test_two_axes_shard_one_dim(sample: Sample) -> None:
    """Blocks on one axis are those of the whole tensor, of which the other has left a rank some."""
    op = sample[1]()
    shared = [typing for typing in op.typings(2, 2) if _shares_a_dim(typing)]
    check_typings(op, mesh_of(2, 2), shared[:: max(1, len(shared) // 8)])


def _shares_a_dim(typing: OpTyping) -> bool:
    """Whether two axes shard one dim of a value. Products are in one ring."""
    shards = ([t.dim for t in x if t.is_shard] for x in (*typing.inputs, *typing.outputs))
    in_rings = sum(name.partition("/")[0] == "ring" for name in typing.rules)
    return in_rings < 2 and any(len(set(dims)) < len(dims) for dims in shards)
