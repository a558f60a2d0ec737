"""A published run as meshfold is asked for it: a configuration, a cluster, and pins.

What meshfold cannot say is not approximated: `setup_of` raises NotExpressible with a reason, and
reasons are counted.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshfold.cost_models.hardware.devices import resolve_cluster, subset
from meshfold.ir.cluster import ClusterSpec, DeviceSpec, LinkSpec
from meshfold.ir.options import CompileOptions, Precision
from published.runs import Run

PRESETS: Mapping[str, str] = {
    "A100-SXM4-40GB": "dgx-a100-40",
    "A100-SXM4-80GB": "dgx-a100-80",
    "A100-PCIe-40GB": "a100-pcie-40",
    "A100-PCIe-80GB": "a100-pcie-80",
    "A800-SXM4-80GB": "dgx-a800",
    "H100-SXM5-80GB": "dgx-h100",
    "H100-SXM5-96GB-HBM2e-500W": "h100-96",
    "H100-PCIe-80GB": "h100-pcie",
    "H800-SXM5-80GB": "dgx-h800",
    "H200-SXM-141GB": "dgx-h200",
    "GH200-96GB": "gh200",
    "B200-SXM-180GB": "dgx-b200",
    "B300-SXM-288GB": "dgx-b300",
    "GB200-186GB": "gb200-nvl72",
    "GB300-288GB": "gb300-nvl72",
    "V100-SXM2-16GB": "dgx-v100-16",
    "V100-SXM2-32GB": "dgx-v100",
    "V100-SXM3-32GB": "dgx2-v100",
    "TITAN-RTX-24GB": "titan-rtx",
    "RTX-3090-24GB": "rtx-3090",
    "RTX-4090-24GB": "rtx-4090",
    "RTX-A6000-48GB": "rtx-a6000",
    "A10G-24GB": "a10g",
    "L4-24GB": "l4",
    "L40S-48GB": "l40s",
    "MI300X-192GB": "mi300x",
}
"""Presets by the device of a run."""

NVLINK_DOMAINS = ("gb200-nvl72", "gb300-nvl72")
"""Presets in which NVLink joins the hosts that a run counts as nodes; a run is taken to have as
many devices in each of as few domains as hold it."""


UNFUSED_ATTENTION = (
    "Megatron-LM v2 (2020)",
    "Megatron-LM (April 2021)",
    "Megatron-LM PTD",
    "Megatron-LM 2022",
    "Megatron-DeepSpeed (GPT",
    "DeepSpeed ZeRO-3",
)
"""How rows name frameworks whose attention went through memory: FlashAttention is of May 2022
(arXiv 2205.14135), these are older or ran without."""


FLASH_ATTENTION_1: Mapping[str, tuple[float, float]] = {
    "A100": (0.4, 0.3),
    "H100": (0.21, 0.16),
}
"""Fractions of the peak, forward and backward, of its kernels: 30 to 50 % and 25 to 35 % of an A100
(Dao, FlashAttention-2, section 1); they use instructions of that generation, of which an H100 does
1.5 times as many, at a peak 3.2 times as high."""

OF_FLASH_ATTENTION_1 = ("llm-foundry",)
"""How rows name frameworks that ran them: flash-attn 1.0 was current when these were published."""

FLASH_ATTENTION_2: Mapping[str, tuple[float, float]] = {"H100": (0.35, 0.29)}
"""Of an H100: 35 % (Shah et al., FlashAttention-3, abstract); backward as much less as in the
preset. The preset of an A100 is FlashAttention-2 already."""

OF_FLASH_ATTENTION_2 = ("torchtitan",)
"""How rows name frameworks whose attention was that of PyTorch 2.5."""

EVERY_SECOND_PRODUCT = ("torchtitan",)
"""How rows name frameworks whose selective recomputation runs every second product again
(pytorch/torchtitan, "Saves output of all compute ops, except every second mm")."""

GRADIENTS_OF_16_BITS = ("NeMo",)
"""How rows name frameworks that keep and reduce gradients in 16 bits (NVIDIA/NeMo,
scripts/performance: grad_reduce_in_fp32 = False); emitted programs keep 32. Of the memory alone."""

ZERO_3_OF_2021 = ("DeepSpeed ZeRO-3",)
"""How rows name it. Its code (microsoft/DeepSpeed of 2021, partition_parameters.py) gathers each
weight alone, when it is needed, and blocks: it is taken to gain nothing by overlap and to merge
nothing. Overlap of reductions (overlap_comm) was off by default, too."""

COLLECTIVES_OF_2021 = 4 / 3
"""Of its collectives for each of an emitted program: it gathers for the forward, to recompute, and
for the backward, and reduces (Rajbhandari et al., ZeRO-Infinity, arXiv 2104.07857, section 4); an
emitted program keeps between the last two what it gathered."""

WEIGHTS_OF_LAYER = 4
"""That are gathered; smaller tensors stay on every rank (its param_persistence_threshold)."""

LIST_ITEM_S = 18e-6
"""Of the host, for each rank of a gathered weight: its collectives take a list with a tensor for
each rank, which it slices and copies, and torch does so once more. Fitted between two models: from
384 to 1536 ranks, steps of 174B beyond compute and volume grow by 19 ms a rank, from 640 to 2240
ranks those of 529B by 20 ms; bytes differ by 3, numbers of weights by 1.1."""

NO_GAIN = 2.0
"""DeviceSpec.overlap_slowdown at which nothing is gained by overlap."""

HOST_OP_S = 34e-6
"""Of the frameworks of published runs, per op of our graph: modules in Python, with hooks and
checkpoints, issue twice as many kernels as an emitted program. Fitted: a microbatch of a small
model takes 3.4 ms a layer, recomputed, whatever its size (VIA-Research/vTrain)."""


SQUARED_RELU = "gelu"
"""What stands for it: Megatron runs it as one kernel that keeps its operand, as GELU is; of the
model's code it would be two."""


class NotExpressible(Exception):
    """The run cannot be asked for; the text is the reason, the same for all alike."""


@dataclass(frozen=True)
class Shape:
    """What has to be captured: a model and its global batch. Hashable, so captured once."""

    fields: tuple[tuple[str, Any], ...]
    """Of the Hugging Face configuration."""
    batch: int
    sequence: int
    precision: Precision


@dataclass(frozen=True)
class Setup:
    """All that find_plan needs besides the captured model."""

    shape: Shape
    cluster: ClusterSpec
    options: CompileOptions
    rerun_share: float = 0.0
    """Of what recompute=full runs again and recompute=selective does not, the part that the run
    does, whose plan is neither. Of the time; memory is that of recompute=selective, a bound."""
    gradient_share: float = 1.0
    """Of the bytes of an emitted program's gradients, those of the run's framework."""


def setup_of(run: Run) -> Setup:
    """Raises NotExpressible."""
    dtype, precision = _precision(run)
    fields = _configuration(run) | {"dtype": dtype}
    shape = Shape(tuple(fields.items()), run.global_batch_size, run.seq_len, precision)
    cluster = _cluster(run)
    options = CompileOptions(
        # Whoever published a run left no margin for us.
        memory_bytes=cluster.memory_bytes,
        pins=_pins(run),
        precision=precision,
        # Apex, DeepSpeed and Composer make no tensors of the size of all parameters in a step.
        optimizer="adamw_fused",
    )
    is_16_bit = run.framework.startswith(GRADIENTS_OF_16_BITS)
    return Setup(shape, cluster, options, _rerun_share(run), 0.5 if is_16_bit else 1.0)


def _rerun_share(run: Run) -> float:
    """By flops, of a Llama layer: of q, k, v, o, gate, up and down every second is k, o and up; all
    that full recomputation runs are the seven and attention to the half of the sequence."""
    if run.recompute != "selective" or not run.framework.startswith(EVERY_SECOND_PRODUCT):
        return 0.0
    hidden, keys = run.hidden_size, run.hidden_size * run.num_kv_heads // run.num_heads
    again = keys + hidden + run.ffn_hidden_size
    return again / (2 * hidden + 2 * keys + 3 * run.ffn_hidden_size + run.seq_len)


def _precision(run: Run) -> tuple[str, Precision]:
    """Of the model and of the compilation."""
    match run.precision.split("_")[0].split("(")[0]:
        case "fp16":
            return "float32", "fp16"
        case "bf16" if run.precision == "bf16_pure":
            return "bfloat16", "model"
        case "bf16":
            return "float32", "bf16"
        case other:
            raise NotExpressible(f"precision {other}")


def _configuration(run: Run) -> dict[str, Any]:
    """Without dropout, which published code draws inside of kernels that run anyway."""
    match run.arch:
        case "gpt":
            return {
                "model_type": "gpt2",
                "n_embd": run.hidden_size,
                "n_layer": run.num_layers,
                "n_head": run.num_heads,
                "n_inner": run.ffn_hidden_size,
                "n_positions": run.seq_len,
                "vocab_size": run.vocab_size,
                **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
            }
        case "llama" | "gpt_sqrelu":
            of_nemotron = {"model_type": "nemotron", "hidden_act": SQUARED_RELU}
            return {
                **({"model_type": "llama"} if run.arch == "llama" else of_nemotron),
                "hidden_size": run.hidden_size,
                "num_hidden_layers": run.num_layers,
                "num_attention_heads": run.num_heads,
                "num_key_value_heads": run.num_kv_heads,
                "intermediate_size": run.ffn_hidden_size,
                "max_position_embeddings": run.seq_len,
                "vocab_size": run.vocab_size,
                "tie_word_embeddings": False,
            }
        case other:
            raise NotExpressible(f"architecture {other}")


def _cluster(run: Run) -> ClusterSpec:
    if run.gpu not in PRESETS:
        raise NotExpressible(f"no preset for {run.gpu}")
    preset = PRESETS[run.gpu]
    rate = ""
    if run.nic_gbps_per_node is not None:
        rate = f"@{run.nic_gbps_per_node / run.gpus_per_node:g}g"
    per_node = resolve_cluster(preset).groups[0].devices_per_node
    is_domain = preset in NVLINK_DOMAINS
    nodes = -(-run.num_gpus // (per_node if is_domain else run.gpus_per_node))
    cluster = resolve_cluster(f"{preset}x{nodes}{rate}")
    if is_domain and nodes > 1:
        if run.num_gpus % nodes:
            raise NotExpressible("NVLink domains with unequal numbers of devices")
        group = replace(cluster.groups[0], devices_per_node=run.num_gpus // nodes)
        return replace(cluster, groups=(group,))
    if not is_domain and per_node != run.gpus_per_node:
        raise NotExpressible(f"nodes of {run.gpus_per_node} {run.gpu}")
    cluster = _of_framework(run, cluster)
    return subset(cluster, run.num_gpus) if run.num_gpus < cluster.num_devices else cluster


def _of_framework(run: Run, cluster: ClusterSpec) -> ClusterSpec:
    """The cluster with the devices of the run's framework, and with its collectives."""
    groups = (
        replace(g, device=_device(run, g.device), link=_link(run, g.link)) for g in cluster.groups
    )
    return replace(cluster, groups=tuple(groups), network=_link(run, cluster.network))


def _link(run: Run, link: LinkSpec) -> LinkSpec:
    """The link under the collectives of the run's framework."""
    if not run.framework.startswith(ZERO_3_OF_2021):
        return link
    return replace(
        link,
        bytes_per_s=link.bytes_per_s / COLLECTIVES_OF_2021,
        rank_s=WEIGHTS_OF_LAYER * LIST_ITEM_S * COLLECTIVES_OF_2021,
    )


def _device(run: Run, device: DeviceSpec) -> DeviceSpec:
    """The device with the attention kernels and the host of the run's framework."""
    device = replace(device, host_op_s=HOST_OP_S)
    if run.framework.startswith(ZERO_3_OF_2021):
        device = replace(device, overlap_slowdown=NO_GAIN)
    if run.framework.startswith(UNFUSED_ATTENTION):
        return replace(device, fused_attention=False)
    for names, kernels in (
        (OF_FLASH_ATTENTION_1, FLASH_ATTENTION_1),
        (OF_FLASH_ATTENTION_2, FLASH_ATTENTION_2),
    ):
        rates = kernels.get(run.gpu.split("-")[0])
        if rates and run.framework.startswith(names):
            return replace(
                device, attention_efficiency=rates[0], attention_backward_efficiency=rates[1]
            )
    return device


_ZERO = re.compile(r"(?P<level>[0-3])( within (?P<ranks>[0-9]+) GPUs, replicated across)?")
"""A ZeRO level, over all data parallel ranks or over some (HSDP)."""


def _pins(run: Run) -> dict[str, int | str]:
    if run.num_gpus != run.tp * run.pp * run.dp * run.cp:
        raise NotExpressible("degrees that do not make the devices")
    if run.dp * run.micro_batch_size * run.num_microbatches != run.global_batch_size:
        raise NotExpressible("a batch that does not divide")
    zero = _ZERO.fullmatch(str(run.zero_stage))
    if zero is None:
        raise NotExpressible(f"ZeRO {run.zero_stage}")
    if run.recompute not in ("none", "full", "selective"):
        raise NotExpressible(f"recompute {run.recompute}")
    pins: dict[str, int | str] = {
        "tp": run.tp,
        "dp": run.dp,
        "cp": run.cp,
        "zero": int(zero["level"]) if run.dp > 1 or zero["ranks"] else 0,
        "dp_shard": int(zero["ranks"] or run.dp),
        "recompute": run.recompute,
        "offload": "none",
        "microbatches": run.num_microbatches,
        "pp": run.pp,
    }
    if run.framework.startswith(ZERO_3_OF_2021):
        pins["allgather_bucket_bytes"] = pins["reduce_bucket_bytes"] = 0
    if run.tp > 1:
        pins["sp"] = int(run.sequence_parallel)
    if run.pp > 1:
        chunks = run.vpp or 1
        pins["schedule"] = "interleaved" if chunks > 1 else "1f1b"
        if chunks > 1:
            pins["virtual_stages"] = chunks
    return pins
