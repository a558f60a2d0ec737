"""Types of forward programs on parameters that are stored already."""

from functools import cache

import pytest
from support.models.returns import decoder

from meshfold.capture.pipeline import Captured, capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.ir.op_graph import SourceKind
from meshfold.ir.returns import ALL, Returns
from meshfold.ir.spmd import INVARIANT, Shard
from meshfold.passes.planner.forward_types import StoredParameter, forward_types
from meshfold.validation.float64_mode import float64_everywhere

CLUSTER = resolve_cluster("local-cpu", 4)
MESH = build_mesh(CLUSTER, 2, 2)


@cache
def captured() -> Captured:
    model, batch = decoder()
    with float64_everywhere():
        return capture(model, {"idx": batch["idx"]}, returns=Returns(outputs=ALL, has_loss=False))


def test_every_parameter_is_read_as_it_is_stored() -> None:
    tp = StoredParameter((Shard(0, 2), Shard(0)), (INVARIANT, Shard(0)))
    data = StoredParameter((Shard(0), INVARIANT), (INVARIANT, INVARIANT))
    parameters = {"head.weight": tp, "blocks.0.up.weight": tp, "blocks.1.up.weight": data}
    split, typings = forward_types(captured().graph, CLUSTER, MESH, parameters, "tensor")
    found = {
        source.name: typings[instance.region].slots[i]
        for instance in split.instances
        for i, source in enumerate(instance.sources)
        if source.kind is SourceKind.PARAMETER
    }
    assert {n: found[n] for n in parameters} == {n: p.stored for n, p in parameters.items()}
    others = [layout for name, layout in found.items() if name not in parameters]
    assert set(others) == {(INVARIANT, INVARIANT)}
    # Layers that store their weights differently are regions of their own.
    assert len(split.regions) == len(captured().graph.regions) + 1


@pytest.mark.parametrize("mode", ["tensor", "sequence"])
def test_what_is_returned_is_whole(mode: str) -> None:
    tp = StoredParameter((INVARIANT, Shard(0)), (INVARIANT, Shard(0)))
    graph = captured().graph
    split, typings = forward_types(graph, CLUSTER, MESH, {"head.weight": tp}, mode)  # type: ignore[arg-type]
    (output,) = split.apart
    region = split.instances[output.source.instance].region
    assert typings[region].outputs[output.source.output] == (INVARIANT, INVARIANT)
