"""A published run as meshfold is asked for it: a configuration, a cluster, and pins.

What meshfold cannot say is not approximated: `setup_of` raises NotExpressible with a reason, and
reasons are counted.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshfold.cost_models.hardware.devices import resolve_cluster, subset
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.options import CompileOptions, Precision
from published.frameworks import (
    FUSED_KERNELS,
    ZERO_3_OF_2021,
    Traits,
    of_framework,
    traits_of,
)
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
    is_fused: bool = False
    """Whether kernels stand in for several ops (benchmarks/published/stand_ins.py)."""


@dataclass(frozen=True)
class Setup:
    """All that find_plan needs besides the captured model."""

    shape: Shape
    cluster: ClusterSpec
    options: CompileOptions
    traits: Traits = Traits()
    """Of the run's framework."""
    has_even_stages: bool = True
    """Whether a pipeline is cut as frameworks do, and not as the search would."""


def setup_of(run: Run) -> Setup:
    """Raises NotExpressible."""
    dtype, precision = _precision(run)
    fields = _configuration(run) | {"dtype": dtype}
    shape = Shape(
        tuple(fields.items()),
        run.global_batch_size,
        run.seq_len,
        precision,
        run.framework.startswith(FUSED_KERNELS),
    )
    cluster = _cluster(run)
    options = CompileOptions(
        # Whoever published a run left no margin for us.
        memory_bytes=cluster.memory_bytes,
        pins=_pins(run),
        precision=precision,
        # Apex, DeepSpeed and Composer make no tensors of the size of all parameters in a step.
        optimizer="adamw_fused",
    )
    return Setup(shape, cluster, options, traits_of(run))


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
        case "llama" | "gpt_sqrelu" | "mixtral":
            return {
                **_kind_of_llama(run),
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


def _kind_of_llama(run: Run) -> dict[str, Any]:
    match run.arch:
        case "gpt_sqrelu":
            return {"model_type": "nemotron", "hidden_act": SQUARED_RELU}
        case "mixtral":
            experts = {"num_local_experts": run.num_experts}
            return {
                "model_type": "mixtral",
                "num_experts_per_tok": run.experts_per_token,
                **experts,
            }
        case other:
            return {"model_type": other}


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
    cluster = of_framework(run, cluster)
    return subset(cluster, run.num_gpus) if run.num_gpus < cluster.num_devices else cluster


_ZERO = re.compile(r"(?P<level>[0-3])( within (?P<ranks>[0-9]+) GPUs, replicated across)?")
"""A ZeRO level, over all data parallel ranks or over some (HSDP)."""


def _pins(run: Run) -> dict[str, int | str]:
    if run.num_gpus != run.tp * run.pp * run.dp * run.cp or run.dp % run.ep:
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
        "dp": run.dp // run.ep,
        "ep": run.ep,
        "cp": run.cp,
        "zero": int(zero["level"]) if run.dp > 1 or zero["ranks"] else 0,
        "dp_shard": int(zero["ranks"] or run.dp // run.ep),
        "recompute": run.recompute,
        "offload": "none",
        "chunked_loss": 0,
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
