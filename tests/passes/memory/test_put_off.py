"""What schedules that split the backward keep for W, by hand and by the allocator."""

from support.programs.local_programs import capture, stack_model

from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.cost_models.pipeline.schedules import Schedule, ScheduleKind
from meshfold.passes.memory.put_off import PutOff, most_bytes, put_off
from meshfold.passes.region.typing import MeshSearch


def test_two_linears_by_hand() -> None:
    """4 rows of float64; up: 8 in, 16 out, down: 16 in, 8 out. tp 2 halves what is between."""
    captured = capture(*stack_model(2))
    row = 4 * 8
    for tp, between in ((1, 16), (2, 8)):
        cluster = resolve_cluster("local-cpu", tp)
        mesh = build_mesh(cluster, 1, tp)
        typed = MeshSearch(captured.graph, cluster, mesh, 4).solve(zero=0)
        found = [
            put_off(captured.graph.regions[i.region].graph, typed.typings[i.region], mesh.sizes)
            for i in captured.graph.instances
        ]
        whole = sum(found, PutOff())
        assert (whole.inputs, whole.gradients) == (2 * (8 + between) * row, 2 * (between + 8) * row)


def test_the_most_of_a_schedule_by_hand() -> None:
    """The last of two devices: F0 B0 F1 B1 W0 ...; of mode 1F1B there is never more than one."""
    schedule = Schedule(ScheduleKind.ZERO_BUBBLE, 2, 4)
    kept, of = {1: 10}, {1: PutOff(8, 5)}
    # W of one beside B of the next: 13 + 10 + 5.
    assert most_bytes(schedule.actions()[1], kept, of) == 28
    assert most_bytes(schedule.actions()[1], kept, {1: PutOff()}) == 10
    assert most_bytes(schedule.actions()[1], {1: 100}, {1: PutOff(1, 1)}) == 103
