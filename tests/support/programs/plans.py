"""Plans built by hand, for tests of the plan file and of its faces."""

import json
from collections.abc import Mapping
from dataclasses import replace

from meshfold.cost_models.simulation.step import simulate
from meshfold.ir.cluster import ClusterSpec, DeviceSpec, LinkSpec, NodeGroup
from meshfold.ir.memory_estimate import MemoryEstimate
from meshfold.ir.mesh import Mesh, MeshAxis
from meshfold.ir.plan import (
    Alternative,
    ConversionRecord,
    MeshOutcome,
    ModelInfo,
    ParameterPlacement,
    Plan,
    PricedStrategy,
    RegionPlan,
    RegionRun,
    SearchStats,
    StagePlan,
    TimeEstimate,
)
from meshfold.ir.spmd import INVARIANT, PARTIAL, REPLICATE, Shard
from meshfold.ir.step_events import (
    CollectiveEvent,
    Event,
    ParameterGroupEvents,
    RegionEvents,
    StepEvents,
)
from meshfold.ir.strategy import OpTyping, RegionTyping, UniformStrategy
from meshfold.plan_file.documents import RECORDS
from meshfold.report.plan_rows import PlanFigures, PlanRow, RowTable, Setting

GIB = 2**30
MESH = Mesh((MeshAxis("dp", 2, "network"), MeshAxis("tp", 4, "nvlink")))
STRATEGY = UniformStrategy(dp=2, tp=4, zero=3, sequence_parallel=True)
INSIDE = LinkSpec("nvlink", 4.5e11, 2e-6, "made up for tests")
NETWORK = LinkSpec("infiniband", 5e10, 5e-6, "made up for tests")
DEVICE = DeviceSpec(
    name="test-80GB",
    memory_bytes=80 * GIB,
    memory_bytes_per_s=3e12,
    peak_flops_per_s={"bfloat16": 9e14, "float32": 6e13},
    matmul_efficiency=0.7,
    memory_efficiency=0.8,
    launch_s=5e-6,
    reserve_bytes=GIB,
    source="made up for tests",
)
CLUSTER = ClusterSpec("test-cluster", (NodeGroup(DEVICE, 2, 4, INSIDE),), NETWORK)

LINEAR = OpTyping(
    rules=("b", "o"),
    inputs=((Shard(0), REPLICATE), (INVARIANT, Shard(0))),
    outputs=((Shard(0), Shard(2)),),
)
BLOCK = RegionPlan(
    name="B",
    fingerprint="b" * 16,
    num_instances=32,
    example_scope="model.layers.0",
    typing=RegionTyping(
        slots=((Shard(0), Shard(1)), (Shard(0, 4), Shard(0))),
        ops=(LINEAR, OpTyping(("I", "I"), (), ((INVARIANT, INVARIANT),))),
        outputs=((Shard(0), PARTIAL),),
    ),
    parameters=(
        ParameterPlacement(
            name="mlp.up_proj.weight",
            shape=(14336, 4096),
            dtype="bfloat16",
            stored=(Shard(0, 4), Shard(0)),
            used=(REPLICATE, Shard(0)),
            num_bytes=14336 * 4096 * 2 // 8,
        ),
    ),
    conversions=(
        ConversionRecord(
            value="input_layernorm",
            kind="activation",
            source=(Shard(0), Shard(1)),
            target=(Shard(0), REPLICATE),
            forward=("all-gather",),
            backward=("reduce-scatter",),
            num_bytes=16 * 2**20,
            forward_s=1.1e-4,
            backward_s=1.2e-4,
        ),
        ConversionRecord(
            value="mlp.up_proj.weight",
            kind="parameter",
            source=(Shard(0, 4), Shard(0)),
            target=(REPLICATE, Shard(0)),
            forward=("all-gather",),
            backward=("reduce-scatter",),
            num_bytes=29 * 2**20,
            forward_s=7e-4,
            backward_s=8e-4,
        ),
    ),
    fallback_ops=("aten.cumsum.default",),
    forward_s=3.1e-3,
    backward_s=6.3e-3,
    communication_s={"dp": 1.5e-3, "tp": 0.9e-3},
    saved_bytes=300 * 2**20,
    strategy=STRATEGY,
    choice=Alternative(STRATEGY.label, 0.0125, 900 * 2**20, "taken"),
    alternatives=(
        Alternative("dp2 x tp4, zero3", 0.0131, 950 * 2**20, "600 us slower and holds more"),
    ),
    op_targets=("aten.linear.default", "aten.arange.default"),
    slot_names=("hidden", "mlp.up_proj.weight"),
)
EMBEDDING = replace(
    BLOCK,
    name="A",
    fingerprint="a" * 16,
    num_instances=1,
    example_scope="model.embed_tokens",
    conversions=(),
    fallback_ops=(),
)

MEMORY = MemoryEstimate(
    parameters=2 * GIB,
    gradients=2 * GIB,
    optimizer=8 * GIB,
    activations=12 * GIB,
    gathered_parameters=GIB // 2,
    buckets=GIB // 4,
    transient=3 * GIB,
    reserve=GIB,
    capacity=40 * GIB,
)

SEARCH = SearchStats(
    num_leaves=40,
    num_priced=12,
    num_infeasible=5,
    pruned={"does not divide": 3},
    lower_bound_s=0.32,
    gap_before=0.01,
    unlimited_s=0.3,
    meshes=(
        MeshOutcome("dp2 x tp4", 0.32, 0.3408, "taken"),
        MeshOutcome("dp8", 0.5, None, "cannot be faster than 1.47 of this plan"),
    ),
)


def cluster_text(spec: ClusterSpec) -> str:
    """A cluster file."""
    return json.dumps(RECORDS.write(spec), indent=2)


def example_plan() -> Plan:
    """A plan with two regions on a 2 x 4 mesh; figures are invented but consistent."""
    return Plan(
        model=ModelInfo(
            name="LlamaForCausalLM",
            fingerprint="f" * 16,
            num_parameters=8_030_261_248,
            num_ops=2114,
            num_distinct_ops=98,
            inputs=(("input_ids", (16, 4096), "int64"), ("labels", (16, 4096), "int64")),
            batch_size=16,
        ),
        cluster=CLUSTER,
        mesh=MESH,
        strategy=STRATEGY,
        pins={"tp": 4},
        optimizer="adamw",
        seed=0,
        regions=(EMBEDDING, BLOCK),
        stages=(StagePlan((RegionRun("A", 0, 1), RegionRun("B", 1, 32))),),
        memory=MEMORY,
        time=TimeEstimate(
            forward_s=0.101,
            backward_s=0.204,
            exposed_communication_s=0.0307,
            optimizer_s=0.0051,
            communication_s={"dp": 0.05, "tp": 0.03},
        ),
        baselines=(
            PricedStrategy(
                "data parallel", UniformStrategy(dp=8), 0.291, 130 * GIB, False, "97 GB short"
            ),
            PricedStrategy("ZeRO-3", UniformStrategy(dp=8, zero=3), 0.402, 38 * GIB, True),
            PricedStrategy(
                "tensor parallel", UniformStrategy(tp=8), 0.9, 39 * GIB, True, "crosses nodes"
            ),
        ),
        search=SEARCH,
        meshfold_version="0.1.0",
        notes=("parameter lm_head.bias is unused",),
    )


def example_step() -> StepEvents:
    """Events of a step of example_plan: an embedding, 32 gathered layers with a collective over tp
    inside, a head."""
    gather = CollectiveEvent("all_gather", ("dp",), "infiniband", 2**20, 2e-3)
    scatter = CollectiveEvent("reduce_scatter", ("dp",), "infiniband", 2**21, 4e-3)
    inside = CollectiveEvent("all_gather", ("tp",), "nvlink", 2**16, 1e-4)
    layer = RegionEvents(
        "B",
        forward=(
            Event("unshard", inside_bytes=1024, number=0),
            Event("forward_prefetch", inside_bytes=1024),
            Event("compute", 3.1e-3, 4096),
            Event("inline", 0.0, 4096, collective=inside),
        ),
        backward=(
            Event("pre_backward", inside_bytes=2048),
            Event("compute", 6.3e-3, 8192),
            Event("reduce", inside_bytes=2048, number=0),
        ),
        groups=(ParameterGroupEvents(gather, scatter, 2**20, 2**21, 2**20, True),),
    )
    ends = [
        RegionEvents(name, (Event("compute", 1e-3, 512),), (Event("compute", 2e-3, 512),))
        for name in ("A", "C")
    ]
    count = 34
    held = (*(k * 1000 for k in range(count)), *((count - k) * 1000 for k in range(count)), 64000)
    return StepEvents(
        regions=(ends[0], layer, ends[1]),
        instances=(0, *[1] * 32, 2),
        trailing=(CollectiveEvent("all_reduce", ("tp",), "nvlink", 4096, 5e-5),),
        optimizer_s=5.1e-3,
        resident_bytes=held,
        fixed_bytes=10**9,
    )


def simulated_plan() -> Plan:
    """A plan with events, and the step that they make."""
    events = example_step()
    return replace(example_plan(), events=events, simulated=simulate(events).step)


def rows_of_rates(tokens_per_s: Mapping[int, float | None]) -> RowTable:
    """Rows over device counts with these rates; None: without a plan."""
    rows = []
    for devices, rate in tokens_per_s.items():
        found = None
        if rate is not None:
            found = PlanFigures(f"dp{devices}", 1 / rate, rate, rate, None, 1, None, devices / rate)
        rows.append(PlanRow(Setting(devices), found, "" if found else "nothing fits"))
    return RowTable("devices", tuple(rows))
