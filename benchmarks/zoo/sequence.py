"""Models of x-transformers, open_clip and monai."""

import importlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from zoo.entry import BATCH, CLASSES, Built, Entry, fits, images, segments, tokens


def _noise(*shape: int) -> Tensor:
    return torch.randn(BATCH, *shape)


def _language(name: str, decoder: str = "Decoder", **fields: Any) -> Entry:
    def build() -> Built:
        x = importlib.import_module("x_transformers")
        layers = getattr(x, decoder)(dim=32, depth=2, heads=4, attn_dim_head=8, **fields)
        return tokens(x.TransformerWrapper(num_tokens=64, max_seq_len=16, attn_layers=layers))

    return Entry("x-transformers", name, build)


class _SeqToSeq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        x = importlib.import_module("x_transformers")
        sides = {
            f"{side}_{key}": value
            for side in ("enc", "dec")
            for key, value in (
                ("num_tokens", 64),
                ("depth", 1),
                ("heads", 4),
                ("max_seq_len", 16),
                ("attn_dim_head", 8),
            )
        }
        self.net = x.XTransformer(dim=32, **sides)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        return self.net(src, tgt)


def _vision_wrapper() -> Built:
    x = importlib.import_module("x_transformers")
    layers = x.Encoder(dim=32, depth=2, heads=4, attn_dim_head=8)
    return images(
        x.ViTransformerWrapper(image_size=32, patch_size=8, num_classes=CLASSES, attn_layers=layers)
    )


def _continuous() -> Built:
    x = importlib.import_module("x_transformers")
    layers = x.Encoder(dim=32, depth=2, heads=4, attn_dim_head=8)
    net = x.ContinuousTransformerWrapper(dim_in=8, dim_out=4, max_seq_len=16, attn_layers=layers)
    return fits(net, _noise(8, 8), BATCH, 8, 4)


def _seq_to_seq() -> Built:
    src, tgt = torch.randint(0, 64, (2, BATCH, 8))
    return _SeqToSeq().train(), {"src": src, "tgt": tgt}


X_TRANSFORMERS = (
    _language("decoder"),
    _language("encoder", "Encoder"),
    _language("rotary", rotary_pos_emb=True),
    _language("alibi", alibi_pos_bias=True),
    _language("t5_bias", rel_pos_bias=True),
    _language("dynamic_bias", dynamic_pos_bias=True),
    _language("qk_norm", attn_qk_norm=True),
    _language("swiglu_rms", ff_glu=True, ff_swish=True, use_rmsnorm=True),
    _language("relu_squared", ff_relu_squared=True, sandwich_norm=True),
    _language("memory_kv", attn_num_mem_kv=4),
    _language("talking_heads", attn_pre_talking_heads=True, attn_post_talking_heads=True),
    _language("grouped_queries", attn_kv_heads=2, attn_flash=True),
    _language("dropout", attn_dropout=0.1, ff_dropout=0.1),
    _language("layer_dropout", layer_dropout=0.1),
    _language("residual_gating", gate_residual=True, residual_attn=True),
    _language("macaron", macaron=True),
    _language("shift_tokens", shift_tokens=1),
    _language("sparse_topk", attn_sparse_topk=4),
    Entry("x-transformers", "vision", _vision_wrapper),
    Entry("x-transformers", "continuous", _continuous),
    Entry("x-transformers", "encoder_decoder", _seq_to_seq),
)


class _Contrastive(nn.Module):
    """open_clip's model with its loss."""

    def __init__(self, net: nn.Module, *, sigmoid: bool = False) -> None:
        super().__init__()
        self.net, self.sigmoid = net, sigmoid

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        found = self.net(image, text)
        if isinstance(found, dict):
            found = found["image_features"], found["text_features"], found["logit_scale"]
        scores = found[2] * found[0] @ found[1].t()
        if self.sigmoid:
            right = 2 * torch.eye(len(scores), dtype=scores.dtype) - 1
            return -functional.logsigmoid(right * scores).sum() / len(scores)
        labels = torch.arange(len(scores))
        return 0.5 * (
            functional.cross_entropy(scores, labels) + functional.cross_entropy(scores.t(), labels)
        )


def _open_clip(name: str, kind: str, sigmoid: bool = False, **fields: Any) -> Entry:
    def build() -> Built:
        model = importlib.import_module("open_clip.model")
        coca = importlib.import_module("open_clip.coca_model")
        made = getattr(model, kind, None) or getattr(coca, kind)
        vision = {"image_size": 32, "patch_size": 8, "width": 32, "head_width": 8, "layers": 2}
        text = {"context_length": 8, "vocab_size": 64, "width": 32, "heads": 4, "layers": 2}
        given = {
            "embed_dim": 16,
            **{name: value for name, value in fields.items() if name not in ("vision", "text")},
            "vision_cfg": {**vision, **fields.get("vision", {})},
            "text_cfg": {**text, **fields.get("text", {})},
        }
        ids = torch.randint(0, 64, (BATCH, 8))
        net = _Contrastive(made(**given), sigmoid=sigmoid).train()
        pixels = given["vision_cfg"]["image_size"]
        return net, {"image": _noise(3, pixels, pixels), "text": ids}

    return Entry("open_clip", name, build)


OPEN_CLIP = (
    _open_clip("clip", "CLIP"),
    _open_clip("clip_quick_gelu", "CLIP", quick_gelu=True),
    _open_clip(
        "clip_resnet", "CLIP", vision={"layers": (1, 1, 1, 1), "width": 8, "image_size": 64}
    ),
    _open_clip("custom_text", "CustomTextCLIP"),
    _open_clip("siglip", "CustomTextCLIP", sigmoid=True, init_logit_bias=-10.0),
    _open_clip("clip_patch_dropout", "CLIP", vision={"patch_dropout": 0.5}),
)


def _monai(
    name: str,
    shape: tuple[int, ...],
    *arguments: Any,
    wrap: str = "segments",
    kind: str = "",
    **fields: Any,
) -> Entry:
    def build() -> Built:
        nets = importlib.import_module("monai.networks.nets")
        net = getattr(nets, kind or name)(*arguments, **fields)
        x = _noise(*shape)
        if wrap == "classes":
            built, batch = images(net)
            return built, {**batch, "x": x}
        if wrap == "fits":
            return fits(net, x, BATCH, *shape)
        built, batch = segments(net)
        return built, {"x": x, "labels": torch.randint(0, 2, (BATCH, *shape[1:]))}

    return Entry("monai", name, build)


_PLANE, _CUBE = (1, 32, 32), (1, 16, 16, 16)
MONAI = (
    _monai("UNet", _PLANE, 2, 1, 2, (8, 16, 32), (2, 2), num_res_units=1),
    _monai("BasicUNet", _PLANE, 2, 1, 2, features=(8, 8, 16, 16, 32, 8)),
    _monai("AttentionUnet", _PLANE, 2, 1, 2, (8, 16, 32), (2, 2)),
    _monai("DynUNet", _PLANE, 2, 1, 2, (3, 3, 3), (1, 2, 2), (2, 2), filters=(8, 16, 32)),
    _monai("SegResNet", _PLANE, 2, 8, 1, 2, blocks_down=(1, 1, 1), blocks_up=(1, 1)),
    _monai("VNet", _CUBE, 3, 1, 2),
    _monai(
        "UNETR", _CUBE, 1, 2, (16, 16, 16), feature_size=4, hidden_size=24, mlp_dim=32, num_heads=4
    ),
    _monai(
        "SwinUNETR",
        (1, 64, 64),
        1,
        2,
        feature_size=12,
        spatial_dims=2,
        depths=(1, 1, 1, 1),
        num_heads=(2, 2, 4, 4),
        window_size=2,
    ),
    _monai(
        "ViT",
        _PLANE,
        1,
        (32, 32),
        (8, 8),
        32,
        64,
        2,
        4,
        wrap="classes",
        classification=True,
        num_classes=CLASSES,
        spatial_dims=2,
    ),
    _monai("DenseNet", _PLANE, 2, 1, CLASSES, 8, 4, (2, 2), wrap="classes"),
    _monai("HighResNet", _PLANE, 2, 1, 2),
    _monai("AutoEncoder", _PLANE, 2, 1, 1, (8, 16), (2, 2), wrap="fits"),
    _monai("VarAutoEncoder", _PLANE, 2, (1, 32, 32), 1, 8, (8, 16), (2, 2), wrap="fits"),
    _monai("Discriminator", _PLANE, (1, 32, 32), (8, 16), (2, 2), wrap="classes"),
    _monai(
        "MedNeXt",
        _PLANE,
        2,
        4,
        1,
        2,
        blocks_down=(1, 1, 1, 1),
        blocks_up=(1, 1, 1, 1),
        blocks_bottleneck=1,
    ),
)
MODELS = (*X_TRANSFORMERS, *OPEN_CLIP, *MONAI)
