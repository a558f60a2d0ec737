"""Peak memory of published runs of Megatron, on the device that was measured.

What layers keep for their backward is what the plan says (RegionPlan.saved_bytes), in as many
microbatches as are in flight; everything else belongs to the framework:

    states      18 bytes a parameter in bf16, 20 in fp16; of d shards of a distributed optimizer
                6 + 12 / d and 4 + 16 / d (NVIDIA/Megatron-LM, README, distributed optimizer); all
                three of ZeRO 3 in shards
    dropout     a mask of a byte for each element of both residual branches (Korthikanti et al.
                2022, section 4.1)
    scores      of attention that is not fused (frameworks.py)
    logits      4 bytes each beside the 2 that the plan keeps: the loss is of a copy in float32,
                whose memory its softmax and its gradient take over; on devices without them
                gradients of what the widest products of a layer made
    workspaces  of cuBLAS and Transformer Engine, the batch, what the loop holds
"""

import math
from collections.abc import Iterator, Mapping

from meshfold.ir.plan import Plan, RegionPlan, RegionRun
from meshfold.ir.spmd import local_shape
from published.frameworks import traits_of
from published.runs import Run

OF_MEGATRON = ("Megatron",)
"""How rows name frameworks that this is about."""

STATE_BYTES: Mapping[str, tuple[float, float]] = {"bf16": (6, 12), "fp16": (4, 16)}
"""Of a parameter: on every rank, and in the shards of a distributed optimizer."""

MASK_BYTES = 2
"""Of an element of a layer's rows."""

FLOAT32_LOGIT_BYTES = 4

WORKSPACE_BYTES: Mapping[str, float] = {"A100": 75e6, "H100": 105e6, "GB200": 105e6, "B200": 105e6}
"""By device: 4 MiB of Transformer Engine and 8 of cuBLAS before Hopper, 32 and 32 from it on; the
rest is fitted to what is allocated between steps of the runs of Megatron-LM's tests."""

LAST = "last"
"""In the kind of memory of a run: of the last device of the pipeline, else of the fullest."""


def measured_bytes(plan: Plan, run: Run) -> float:
    """Bytes that PyTorch allocated at the peak, of the device that was measured."""
    each = list(_devices(plan, run))
    return each[-1] if LAST in (run.mem_kind or "").lower() else max(each)


def _devices(plan: Plan, run: Run) -> Iterator[float]:
    """Bytes of each device of the pipeline."""
    regions = {region.name: region for region in plan.regions}
    for device in range(run.pp):
        stages = plan.stages[device :: run.pp]
        runs = [each for stage in stages for each in stage.runs]
        layers = _layers_in_flight(run, device)
        kept = sum(
            _kept_bytes(region, run) * (layers if _is_layer(region, run) else 1)
            for region in {r.region: regions[r.region] for r in runs}.values()
        )
        is_last = device == run.pp - 1
        logits = FLOAT32_LOGIT_BYTES * _tokens(run) * run.vocab_size / run.tp
        transient = logits if is_last else _layer_gradients_bytes(run)
        states = _num_parameters(plan, regions, runs, run) * _state_bytes(run)
        yield states + kept + transient + WORKSPACE_BYTES[run.gpu.split("-")[0]]


def _layers_in_flight(run: Run, device: int) -> float:
    """Layers of a device, each as often as microbatches are in flight in it: forwards of the
    warm-up and the one after it, under 1F1B and under its interleaved form, whose devices run all
    but their last stage for groups of pp microbatches (Narayanan et al. 2021, section 2.2)."""
    virtual, behind = run.vpp or 1, run.pp - 1 - device
    warm_up = behind if virtual == 1 else 2 * behind + (virtual - 1) * run.pp
    forwards = min(warm_up + 1, run.num_microbatches * virtual)
    return forwards * run.num_layers / (run.pp * virtual)


def _layer_gradients_bytes(run: Run) -> float:
    """Of the results of the first products of an MLP, in 16 bits: two where one gates the other."""
    num_products = 1 if run.arch.startswith("gpt") else 2
    return 2 * num_products * _tokens(run) * run.ffn_hidden_size / run.tp


def _is_layer(region: RegionPlan, run: Run) -> bool:
    return region.num_instances == run.num_layers


def _tokens(run: Run) -> float:
    """Of a microbatch, on one rank of cp."""
    return run.micro_batch_size * run.seq_len / run.cp


def _kept_bytes(region: RegionPlan, run: Run) -> float:
    """Of a microbatch, by one instance."""
    if not _is_layer(region, run):
        return region.saved_bytes
    traits = traits_of(run)
    masks = MASK_BYTES * _tokens(run) * run.hidden_size
    masks /= run.tp if run.sequence_parallel else 1
    beside = (traits.score_bytes - traits.regathered_bytes) / run.num_layers
    return region.saved_bytes + beside + masks


def _num_parameters(
    plan: Plan, regions: Mapping[str, RegionPlan], runs: list[RegionRun], run: Run
) -> float:
    """On one rank of tp. The embedding of a GPT is its head as well, and counts once."""
    shapes = [
        (p.shape, local_shape(p.shape, p.used, plan.mesh.sizes), r.count)
        for r in runs
        for p in regions[r.region].parameters
    ]
    found = sum(count * math.prod(local) for _, local, count in shapes)
    tables = [math.prod(local) for shape, local, _ in shapes if shape[0] == run.vocab_size]
    return found - (sum(tables[1:]) if run.arch == "gpt" else 0)


def _state_bytes(run: Run) -> float:
    """Of a parameter."""
    whole, sharded = STATE_BYTES[run.precision.split("_")[0]]
    match str(run.zero_stage)[0]:
        case "0":
            return whole + sharded
        case "3":
            return (whole + sharded) / (run.dp * run.cp)
        case _:
            return whole + sharded / (run.dp * run.cp)
