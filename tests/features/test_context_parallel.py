"""Programs whose sequence is sharded: attention trades rows for heads by all-to-all, also inside of
the heads that tp shards, and computes what one process computes."""

from dataclasses import replace
from functools import cache

import pytest
from support.models.hugging_face import tiny_model
from support.programs.local_programs import errors_of_a_step
from torch import Tensor, nn

from meshfold.capture.pipeline import Captured, capture
from meshfold.codegen.emit.region import emit_typed
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.strategy import Degrees
from meshfold.passes.region.typing import MeshSearch
from meshfold.validation.float64_mode import float64_everywhere


def without_latency(num_devices: int) -> ClusterSpec:
    """Without start-up costs and with fast memory, work and bytes between ranks decide, as they do
    for long sequences."""
    cluster = resolve_cluster("local-cpu", num_devices)
    (group,) = cluster.groups
    link = replace(group.link, latency_s=0.0, start_s=0.0, ramp_bytes=0.0, bytes_per_s=1e8)
    fast = 100 * group.device.memory_bytes_per_s
    device = replace(group.device, launch_s=0.0, memory_bytes_per_s=fast)
    return replace(cluster, groups=(replace(group, link=link, device=device),))


@cache
def captured(family: str, batch_size: int) -> tuple[nn.Module, dict[str, Tensor], Captured]:
    """A batch that dp alone cuts up: then heads are all there is to trade."""
    model, batch = tiny_model(family)
    batch = {name: value[:batch_size] for name, value in batch.items()}
    with float64_everywhere():
        return model, batch, capture(model, batch)


def emitted(family: str, degrees: Degrees, sequence_parallel: bool = False) -> EmittedProgram:
    _, _, found = captured(family, degrees.dp)
    cluster = without_latency(degrees.dp * degrees.cp * degrees.tp)
    mesh = build_mesh(cluster, degrees.dp, degrees.tp, cp=degrees.cp)
    search = MeshSearch(found.graph, cluster, mesh, degrees.dp)
    typed = search.solve(zero=0, mode="sequence" if sequence_parallel else "tensor")
    return emit_typed(found.graph, typed.typings, search.costs)


def rows_of_attention(program: EmittedProgram) -> set[str]:
    """Axes that shard the rows of a query."""
    return {
        program.mesh.names[axis]
        for region, of_region in zip(program.folded.regions, program.typings, strict=True)
        for op, typing in zip(region.graph.ops, of_region.ops, strict=True)
        if "attention" in op.target
        for axis, t in enumerate(typing.inputs[0])
        if t.dim == 2
    }


@pytest.mark.parametrize(
    ("family", "degrees"),
    [
        ("llama", Degrees(cp=4)),
        pytest.param("gpt2", Degrees(cp=4), marks=pytest.mark.slow),
        pytest.param("bert", Degrees(cp=4), marks=pytest.mark.slow),
        pytest.param("llama", Degrees(cp=2, tp=2), marks=pytest.mark.slow),
        pytest.param("gpt2", Degrees(dp=2, cp=2, tp=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_heads_for_rows_and_back_equal_one_process(family: str, degrees: Degrees) -> None:
    program = emitted(family, degrees)
    assert "all_to_all" in program.text(0)
    assert rows_of_attention(program) == set(), "heads are cut, rows are whole"
    for errors in errors_of_a_step(*captured(family, degrees.dp), program):
        worst = max(errors, key=errors.__getitem__)
        assert errors[worst] <= 1e-12, worst
