"""Further families of transformers: the small configuration of benchmarks/zoo/family_small.py, and
what is special about each."""

from collections.abc import Iterable
from typing import Any

from zoo.family_fields import Family
from zoo.family_small import small


def _all(suffix: str, tail: str, prefixes: Iterable[str], **fields: Any) -> tuple[Family, ...]:
    """A family of each prefix: "Bloom" is bloom + suffix, of the class BloomFor..."""
    return tuple(small(p.lower() + suffix, p + tail, **fields) for p in prefixes)


_DECODERS = (
    *("Bloom", "BioGpt", "Arcee", "Cwm", "BitNet", "Emu3", "Ernie4_5", "Doge", "AriaText"),
    *("GPTNeoXJapanese", "HunYuanDenseV1", "HyperCLOVAX", "Jais2", "Kolibri1", "Mellum"),
    *("MiniCPM3", "Ministral3", "ModernBertDecoder", "NanoChat", "Flint", "GraniteSWA"),
    *("SeedOss", "VaultGemma", "Beam", "Youtu"),
)
_MIXTURES = (
    *("Afmoe", "Cohere2Moe", "DeepseekV2", "DeepseekV32", "Dots1", "Ernie4_5_Moe", "ExaoneMoe"),
    *("FlexOlmo", "Glm4MoeLite", "GlmMoeDsa", "GraniteMoeShared", "HunYuanMoEV1", "HYV3"),
    *("MiMoV2Flash", "MiniMaxM2", "Laguna", "AXK1", "JetMoe", "Mistral4"),
    *("SolarOpen", "GraniteMoeHybrid"),
)
_ENCODERS = (
    *("Camembert", "Data2VecText", "Ernie", "XLMRoberta", "XLMRobertaXL", "RobertaPreLayerNorm"),
    *("MobileBert", "Nystromformer", "RemBert", "Tapas", "LayoutLM", "IBert", "NomicBert"),
    *("EuroBert", "Yoso"),
)
_CLASSIFIERS = (
    *("Bert", "Roberta", "DistilBert", "Albert", "Electra", "DebertaV2", "MPNet", "FNet"),
    *("ModernBert", "XLNet", "GPT2", "Llama", "Qwen2", "Gemma", "OPT", "Bloom", "GPTNeoX"),
    *("Mistral", "Phi3", "Deberta", "SqueezeBert", "Olmo2", "StableLm"),
)
_ANSWERING = ("Bert", "Roberta", "Electra", "Albert", "Bart", "DistilBert", "SqueezeBert", "MPNet")
_STAGES = {"hidden_sizes": [16, 32], "depths": [1, 1]}
_PYRAMID = {
    **_STAGES,
    "num_encoder_blocks": 2,
    "sr_ratios": [2, 1],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "num_attention_heads": [2, 4],
    "mlp_ratios": [2, 2],
}
_WINDOWS = {"image_size": 32, "embed_dim": 16, "depths": [2, 2], "num_heads": [4, 8]}

FAMILIES: tuple[Family, ...] = (
    *_all("", "ForCausalLM", _DECODERS),
    *_all("", "ForCausalLM", _MIXTURES),
    *_all("", "ForMaskedLM", _ENCODERS),
    *_all("_classes", "ForSequenceClassification", _CLASSIFIERS),
    *_all("_tags", "ForTokenClassification", ("Bert", "Electra", "XLNet", "GPT2", "Llama")),
    *_all("_spans", "ForQuestionAnswering", _ANSWERING),
    *_all("_choices", "ForMultipleChoice", ("Bert", "Electra", "XLNet")),
    *_all(
        "",
        "ForSequenceClassification",
        ("Hubert", "WavLM", "UniSpeech", "UniSpeechSat", "SEW", "Data2VecAudio"),
        kind="wave",
    ),
    *_all("_ctc", "ForCTC", ("Wav2Vec2", "Hubert", "WavLM")),
    *_all(
        "",
        "ForImageClassification",
        ("Dinov2WithRegisters", "Data2VecVision", "ViTMSN", "IJepa"),
    ),
    small("convnextv2", "ConvNextV2ForImageClassification", **_STAGES, num_stages=2),
    small(
        "regnet",
        "RegNetForImageClassification",
        **_STAGES,
        embedding_size=8,
        groups_width=8,
        layer_type="y",
    ),
    small(
        "bit",
        "BitForImageClassification",
        **_STAGES,
        embedding_size=16,
        num_groups=4,
        layer_type="preactivation",
    ),
    small("pvt_v2", "PvtV2ForImageClassification", **_PYRAMID, image_size=32),
    small("swinv2", "Swinv2ForImageClassification", **_WINDOWS, window_size=4),
    small("segformer_segments", "SegformerForSemanticSegmentation", **_PYRAMID, image_size=16),
)
