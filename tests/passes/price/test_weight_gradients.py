"""Which part of a region's backward makes weight gradients."""

import pytest
from support.models.hugging_face import tiny_model

from meshfold.capture.pipeline import capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.cost_models.op_costs.compute import op_name
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.passes.price.op_time import op_time
from meshfold.passes.price.weight_gradients import weight_gradients_s
from meshfold.passes.rules.table import region_rules


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "gpt_oss"])
def test_half_of_the_backward_of_each_product_with_a_weight(family):
    model, batch = tiny_model(family)
    folded = capture(model, batch).graph
    cluster = resolve_cluster("local-cpu", 1)
    mesh = build_mesh(cluster, 1, 1)
    costs = CostModel(cluster, mesh)
    graph = max((r.graph for r in folded.regions), key=lambda g: len(_products(g)))
    rules = [[of_axis[0] for of_axis in of_op] for of_op in region_rules(graph, mesh.sizes)]
    found = weight_gradients_s(graph, rules, costs)
    times = [op_time(graph, op, r, costs) for op, r in zip(graph.ops, rules, strict=True)]
    products = sum(times[k].backward_s for k in _products(graph))
    assert found == pytest.approx(products / 2)
    assert 0 < found < sum(t.backward_s for t in times)


def _products(graph):
    products = ("linear", "addmm", "mm", "expert_linear")
    return [k for k, op in enumerate(graph.ops) if op_name(op.target) in products]
