"""What would fit where nothing does, on invented plans."""

from collections.abc import Mapping
from dataclasses import replace

from support.programs.plans import CLUSTER, example_plan

from meshfold.errors import InfeasibleError
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.mesh import Mesh, MeshAxis
from meshfold.ir.options import CompileOptions, PinValue
from meshfold.ir.plan import Plan
from meshfold.studies.remedies import PlanIn, larger, with_remedies

ERROR = InfeasibleError(
    "nothing fits; use more",
    binding_constraint="activations",
    best_candidate="dp8",
    required_bytes=80_000,
    available_bytes=40_000,
)


def said(plan_in: PlanIn, pins: Mapping[str, PinValue] | None = None) -> str:
    found = with_remedies(ERROR, CLUSTER, CompileOptions(pins=pins or {}), plan_in)
    assert (found.binding_constraint, found.best_candidate) == ("activations", "dp8")
    assert (found.required_bytes, found.available_bytes) == (80_000, 40_000)
    return str(found)


def on(num_devices: int) -> Plan:
    return replace(example_plan(), mesh=Mesh((MeshAxis("dp", num_devices),)))


def test_devices_and_memory() -> None:
    """32 devices do, 16 do not; 58 kB do: half of the 40 that are missing."""

    def plan_in(cluster: ClusterSpec, options: CompileOptions) -> Plan | None:
        fits = cluster.num_devices >= 32 or (options.memory_bytes or 0) >= 58_000
        return on(cluster.num_devices) if fits else None

    assert said(plan_in) == (
        "nothing fits; use more; microbatches and stages were tried, too; planned again, these "
        "would fit: 32 devices (dp2 x tp4+sp, zero3); 60.0 kB per device (dp2 x tp4+sp, zero3)"
    )


def test_what_the_best_candidate_needs() -> None:
    """Half of it is not enough."""

    def plan_in(cluster: ClusterSpec, options: CompileOptions) -> Plan | None:
        fits = (options.memory_bytes or 0) >= 80_000 and options.pins["microbatches"] == 1
        return on(cluster.num_devices) if fits else None

    assert said(plan_in).endswith("these would fit: 80.0 kB per device (dp2 x tp4+sp, zero3)")


def test_a_pin_that_forbids_microbatches() -> None:
    def plan_in(_: ClusterSpec, options: CompileOptions) -> Plan | None:
        return on(8) if options.pins == {"tp": 4} else None

    text = said(plan_in, {"tp": 4, "pp": 1, "microbatches": 1})
    assert "were tried" not in text
    assert text.endswith("fit: without pin pp=1, microbatches=1 (dp2 x tp4+sp, zero3)")
    text = said(plan_in, {"tp": 4, "layout:a": "dp"})
    assert text.endswith("fit: without pin layout:a=dp (dp2 x tp4+sp, zero3)")


def test_nothing_helps() -> None:
    assert said(lambda *_: None).endswith(
        "planned again, nothing fits in one pass on 64 devices either"
    )


def test_a_larger_cluster_has_more_nodes() -> None:
    found = larger(CLUSTER, 4)
    assert (found.num_nodes, found.num_devices) == (8, 32)
    assert found.groups[0].devices_per_node == 4
