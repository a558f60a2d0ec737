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
from published.runs import Run

PRESETS: Mapping[str, str] = {
    "A100-SXM4-40GB": "dgx-a100-40",
    "A100-SXM4-80GB": "dgx-a100-80",
    "H100-SXM5-80GB": "dgx-h100",
    "H200-SXM-141GB": "dgx-h200",
    "B200-SXM-180GB": "dgx-b200",
}
"""Presets by the device of a run."""

LINE_RATE_SHARE = 0.86
"""Of a network's line rate that a ring reaches: 86 of 100 GB/s on 2 x 8 A100,
NVIDIA/nccl-tests#175."""


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


def setup_of(run: Run) -> Setup:
    """Raises NotExpressible."""
    dtype, precision = _precision(run)
    fields = _configuration(run) | {"dtype": dtype}
    shape = Shape(tuple(fields.items()), run.global_batch_size, run.seq_len, precision)
    options = CompileOptions(pins=_pins(run), precision=precision, allow_planned=True)
    return Setup(shape, _cluster(run), options)


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
    """Without dropout: published code draws it inside of kernels that run anyway."""
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
            return {
                "model_type": "llama" if run.arch == "llama" else "nemotron",
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
    nodes = -(-run.num_gpus // run.gpus_per_node)
    cluster = resolve_cluster(f"{preset}x{nodes}")
    if cluster.groups[0].devices_per_node != run.gpus_per_node:
        raise NotExpressible(f"nodes of {run.gpus_per_node} {run.gpu}")
    if run.nic_gbps_per_node is not None and nodes > 1:
        rate = run.nic_gbps_per_node / 8 * 1e9 / run.gpus_per_node * LINE_RATE_SHARE
        cluster = replace(cluster, network=replace(cluster.network, bytes_per_s=rate))
    return subset(cluster, run.num_gpus) if run.num_gpus < cluster.num_devices else cluster


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
        "zero": int(zero["level"]),
        "dp_shard": int(zero["ranks"] or run.dp),
        "recompute": run.recompute,
        "offload": "none",
        "microbatches": run.num_microbatches,
        "pp": run.pp,
    }
    if run.tp > 1:
        pins["sp"] = int(run.sequence_parallel)
    if run.pp > 1:
        chunks = run.vpp or 1
        pins["schedule"] = "interleaved" if chunks > 1 else "1f1b"
        if chunks > 1:
            pins["virtual_stages"] = chunks
    return pins
