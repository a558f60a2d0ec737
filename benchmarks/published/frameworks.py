"""What belongs to the framework of a published run and not to its plan: kernels, the host, and what
its collectives and its recomputation do that an emitted program does not.

Some of it is said in the cluster (of_framework), the rest in Traits, which
benchmarks/published/predict.py applies to the prediction of an emitted program.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from meshfold.ir.cluster import OVERLAP_SLOWDOWN, ClusterSpec, DeviceSpec, LinkSpec
from published.runs import Run

UNFUSED_ATTENTION = (
    "Megatron-LM v2 (2020)",
    "Megatron-LM (April 2021)",
    "Megatron-LM PTD",
    "Megatron-LM 2022",
    "Megatron-DeepSpeed",
    "DeepSpeed ZeRO-3",
    "Megatron-Core (test suite",
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

LESS_TO_ADD = (
    (1.0, ("NeMo", "Megatron-LM 0.14", "Megatron-LM 2022", "Megatron-DeepSpeed", "InternEvo")),
)
"""How rows name frameworks that move less than an emitted program to add gradients up over
microbatches, and by how many times these gradients in 32 bits. A program adds 16 bits to 32 (10
bytes a number), as Megatron-LM before 2022 does (main_grad.add_). Products of NVIDIA/Megatron-LM of
2022 and later read and write the sum in place of a result of their own
(gradient_accumulation_fusion: 6); DeepSpeed and InternEvo add 16 bits to 16 bits (6)."""

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

HOST_OP_S: Mapping[str, float] = {"V100": 52e-6, "A100": 52e-6}
"""Of the frameworks of published runs, per op of our graph, by the device beside the host: modules
in Python, with hooks and checkpoints, issue twice as many kernels as an emitted program. Fitted,
with NO_GRAD_SHARE of it for the first of two forwards: a microbatch of a small model in one stage
takes 3.3 ms a layer, whatever its size, all recomputed (VIA-Research/vTrain)."""

LATER_HOST_OP_S = 34e-6
"""The same of hosts of later devices, whose cores are faster: at most, of 12 layers on 8 B200
(SimuMax)."""

NO_GRAD_SHARE = 0.25
"""Of that, in a forward that is recomputed later: no graph of its backward is built. Fitted: stages
that recompute take 9 % longer than those that do not where the host decides
(VIA-Research/vTrain)."""

FUSED_KERNELS = ("NeMo", "Megatron Bridge", "Megatron-Core")
"""How rows name frameworks that run Transformer Engine: rotary embeddings are one kernel each for
queries and keys, and attention reads keys and values of fewer heads than queries as they are."""

FLASH_ATTENTION_3: Mapping[str, tuple[float, float]] = {"H100": (0.6, 0.49)}
"""Fractions of the peak of the attention of these, cuDNN's: forward as FlashAttention-3 with heads
of 128, causal (Shah et al., 2024, figure 5, from memory); backward as much less as in the
preset."""

OVERLAPPED_TP = ("NeMo", "Megatron Bridge")
"""How rows name frameworks whose recipes overlap the collectives of tensor parallel ranks with the
products beside them (tp_comm_overlap of NVIDIA/NeMo, nemo/collections/llm/recipes)."""


REGATHERING = ("Megatron", "NeMo")
"""How rows name frameworks that keep of what a product reads the shard of a rank, with sequence
parallelism, and gather it again in the backward, beside the product for the gradient of the rows
(Korthikanti et al. 2022, section 4.2.2), so that it takes no time; an emitted program keeps what it
gathered."""

KEEPING_LAST_STAGE = ("Megatron-DeepSpeed",)
"""How rows name frameworks whose last stage recomputes nothing, as its backward follows each
forward at once (the simulator of VIA-Research/vTrain@f8dda84, which is held against these runs; of
one stage that is the whole model). Head and loss are in no checkpoint of any framework."""

GATHERED = 2
"""Times that a layer gathers its sequence: before the products of attention, and of the rest."""

SCORE_BYTES = 5
"""Of a score of unfused attention, kept for the backward: what softmax gives and what dropout left
of it in 16 bits, and a mask of a byte (Korthikanti et al. 2022, section 4.1)."""


@dataclass(frozen=True)
class Traits:
    """What a framework does otherwise than an emitted program, as shares of what that does."""

    rerun_share: float = 0.0
    """Of what recompute=full runs again and recompute=selective does not, the part that the run
    does, whose plan is neither. Of the time; memory is that of recompute=selective, a bound."""
    gradient_share: float = 1.0
    """Of the bytes of gradients."""
    hidden_tp_share: float = 0.0
    """Of the exposed collectives of tp, what the run hides."""
    regathered_bytes: float = 0.0
    """Of a microbatch and all layers, of the activations that an emitted program keeps for its
    backward what the run gathers again, on one rank of tp."""
    score_bytes: float = 0.0
    """Of a microbatch and all layers, of the scores that the run keeps and a program does not, on
    one rank."""
    keeps_last_stage: bool = False
    """Whether the last stage recomputes nothing where others recompute all."""
    less_to_add: float = 0.0
    """Of what gradients in 32 bits take, what is not moved to add those of a microbatch up."""
    adds_16_bits: bool = False
    """Whether products add weight gradients of microbatches up themselves, in 16 bits."""


def traits_of(run: Run) -> Traits:
    """The traits of the run's framework."""
    is_16_bit = run.framework.startswith(GRADIENTS_OF_16_BITS)
    return Traits(
        rerun_share=_rerun_share(run),
        gradient_share=0.5 if is_16_bit else 1.0,
        hidden_tp_share=_hidden_tp_share(run),
        regathered_bytes=_regathered_bytes(run),
        score_bytes=_score_bytes(run),
        keeps_last_stage=run.framework.startswith(KEEPING_LAST_STAGE),
        less_to_add=next((x for x, names in LESS_TO_ADD if run.framework.startswith(names)), 0.0),
        adds_16_bits=is_16_bit,
    )


def _regathered_bytes(run: Run) -> float:
    """Of 16 bits a number. What is recomputed as a whole keeps none of it."""
    keeps = run.recompute != "full" and run.sequence_parallel
    if not (keeps and run.framework.startswith(REGATHERING)):
        return 0.0
    gathered = 2 * run.micro_batch_size * run.seq_len // run.cp * run.hidden_size
    return run.num_layers * GATHERED * gathered * (1 - 1 / run.tp)


def _score_bytes(run: Run) -> float:
    """None where attention is recomputed."""
    if run.recompute != "none" or not _is_unfused(run):
        return 0.0
    scores = run.micro_batch_size * run.num_heads / run.tp * run.seq_len**2 / run.cp
    return run.num_layers * SCORE_BYTES * scores


def _is_unfused(run: Run) -> bool:
    """Whether scores of attention go through memory."""
    return run.attention == "unfused" or (
        not run.attention and run.framework.startswith(UNFUSED_ATTENTION)
    )


def _hidden_tp_share(run: Run) -> float:
    """A collective runs in tp pieces beside the tp pieces of its product, but for the first or the
    last one; while they overlap, both are slower by what devices lose by it."""
    if not (run.sequence_parallel and run.framework.startswith(OVERLAPPED_TP)):
        return 0.0
    return (1 - 1 / run.tp) * (2 - OVERLAP_SLOWDOWN)


def _rerun_share(run: Run) -> float:
    """By flops, of a Llama layer: of q, k, v, o, gate, up and down every second is k, o and up; all
    that full recomputation runs are the seven and attention to the half of the sequence."""
    if run.recompute != "selective" or not run.framework.startswith(EVERY_SECOND_PRODUCT):
        return 0.0
    hidden, keys = run.hidden_size, run.hidden_size * run.num_kv_heads // run.num_heads
    again = keys + hidden + run.ffn_hidden_size
    return again / (2 * hidden + 2 * keys + 3 * run.ffn_hidden_size + run.seq_len)


def of_framework(run: Run, cluster: ClusterSpec) -> ClusterSpec:
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


def without_gradients(cluster: ClusterSpec) -> ClusterSpec:
    """The cluster with the host of a forward that builds no graph of its backward."""
    groups = (
        replace(g, device=replace(g.device, host_op_s=NO_GRAD_SHARE * g.device.host_op_s))
        for g in cluster.groups
    )
    return replace(cluster, groups=tuple(groups))


def _device(run: Run, device: DeviceSpec) -> DeviceSpec:
    """The device with the attention kernels and the host of the run's framework."""
    family = run.gpu.split("-")[0]
    device = replace(device, host_op_s=HOST_OP_S.get(family, LATER_HOST_OP_S))
    if run.framework.startswith(ZERO_3_OF_2021):
        device = replace(device, overlap_slowdown=NO_GAIN)
    if _is_unfused(run):
        return replace(device, fused_attention=False)
    for names, kernels in (
        (OF_FLASH_ATTENTION_1, FLASH_ATTENTION_1),
        (OF_FLASH_ATTENTION_2, FLASH_ATTENTION_2),
        (FUSED_KERNELS, FLASH_ATTENTION_3),
    ):
        rates = kernels.get(family)
        if rates and run.framework.startswith(names):
            return replace(
                device, attention_efficiency=rates[0], attention_backward_efficiency=rates[1]
            )
    return device
