"""Models of timm."""

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from zoo.entry import CLASSES, Built, Entry, images, of


def _timm(name: str, pixels: int = 32, **fields: Any) -> Entry:
    def build() -> Built:
        timm = importlib.import_module("timm")
        return images(timm.create_model(name, num_classes=CLASSES, **fields), pixels)

    return Entry("timm", name, build)


def _of_timm(name: str, module: str, build: Callable[[Any], nn.Module], pixels: int = 32) -> Entry:
    """A model that timm builds small from its class only. build: of timm's module."""
    return of("timm", name, f"timm.models.{module}", lambda m: images(build(m), pixels))


def _mixer(name: str, layers: Callable[[Any], dict[str, Any]]) -> Entry:
    fields = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_blocks": 2}
    return _of_timm(
        name, "mlp_mixer", lambda m: m.MlpMixer(**fields, **layers(m), num_classes=CLASSES)
    )


def _caformer(m: Any) -> nn.Module:
    mixers = (m.SepConv, m.SepConv, m.Attention, m.Attention)
    norms = (m.LayerNorm2dNoBias,) * 2 + (m.LayerNormNoBias,) * 2
    dims = (8, 16, 32, 64)  # heads of attention have 32
    fields = {**_STAGES, "dims": dims, "token_mixers": mixers, "norm_layers": norms}
    return m.MetaFormer(**fields, num_classes=CLASSES)


def _tiny_vit(m: Any) -> nn.Module:
    fields = {"embed_dims": (16, 16, 32, 32), "num_heads": (1, 1, 2, 2)}
    depths, windows = (1, 1, 1, 1), (4, 4, 4, 4)
    return m.TinyVit(**fields, depths=depths, window_sizes=windows, num_classes=CLASSES)


_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
_STAGES = {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)}
_SWIN: dict[str, Any] = {
    "img_size": 32,
    "window_size": 4,
    "embed_dim": 16,
    "depths": (2, 2),
    "num_heads": (2, 4),
}
TIMM = (
    _timm("vit_tiny_patch16_224", **_VIT),
    _timm("vit_small_patch16_224", **_VIT, drop_path_rate=0.2, qk_norm=True, init_values=0.1),
    _timm("deit_tiny_distilled_patch16_224", **_VIT),
    _timm("beit_base_patch16_224", **_VIT),
    _timm("cait_xxs24_224", **_VIT),
    _timm("xcit_nano_12_p8_224", **_VIT),
    _timm("eva02_tiny_patch14_224", **{**_VIT, "num_heads": 2}),
    _mixer("mixer", lambda m: {}),
    _mixer("resmlp", lambda m: {"mlp_ratio": 4, "block_layer": m.ResBlock, "norm_layer": m.Affine}),
    _mixer(
        "gmlp",
        lambda m: {"mlp_ratio": 6, "block_layer": m.SpatialGatingBlock, "mlp_layer": m.GatedMlp},
    ),
    _timm("swin_tiny_patch4_window7_224", **_SWIN),
    _timm("swinv2_tiny_window8_256", **_SWIN),
    _timm("convnext_atto", **_STAGES),
    _timm("convnextv2_atto", **_STAGES, drop_path_rate=0.1),
    _timm("resnet18", channels=(8, 16, 24, 32), stem_width=8),
    _timm("resnet26d", layers=(1, 1, 1, 1), channels=(8, 16, 24, 32)),
    _timm("seresnet50", layers=(1, 1, 1, 1), channels=(8, 16, 24, 32)),
    _timm("regnetx_002"),
    _timm("mobilenetv3_small_050"),
    _of_timm(
        "efficientnet_lite",
        "efficientnet",
        lambda m: m._gen_efficientnet_lite("efficientnet_lite0", 0.25, 0.3, num_classes=CLASSES),
    ),
    _timm("ghostnet_050"),
    _timm("mnasnet_small"),
    _of_timm("poolformer", "metaformer", lambda m: m.MetaFormer(**_STAGES, num_classes=CLASSES)),
    _of_timm("caformer", "metaformer", _caformer),
    _timm("pvt_v2_b0", depths=(1, 1, 1, 1), embed_dims=(8, 16, 24, 32), num_heads=(1, 2, 3, 4)),
    _timm(
        "twins_svt_small", depths=(1, 1, 1, 1), embed_dims=(16, 16, 32, 32), num_heads=(2, 2, 2, 2)
    ),
    _timm("edgenext_xx_small", depths=(1, 1, 1, 1), dims=(8, 16, 24, 32), heads=(2, 2, 2, 2)),
    _timm("davit_tiny", depths=(1, 1), embed_dims=(16, 32), num_heads=(2, 4), window_size=4),
    _of_timm(
        "focalnet",
        "focalnet",
        lambda m: m.FocalNet(depths=(1, 1, 1, 1), embed_dim=8, num_classes=CLASSES),
    ),
    _timm("inception_next_atto", depths=(1, 1, 1, 1), dims=(8, 16, 24, 32)),
    _timm(
        "sequencer2d_s", layers=(1, 1, 1, 1), embed_dims=(16, 16, 16, 16), hidden_sizes=(4, 4, 4, 4)
    ),
    _timm("starnet_s1", base_dim=8, depths=(1, 1, 1, 1)),
    _of_timm(
        "convmixer",
        "convmixer",
        lambda m: m.ConvMixer(dim=16, depth=2, patch_size=4, num_classes=CLASSES),
    ),
    _of_timm(
        "efficientformerv2_s0",
        "efficientformer_v2",
        lambda m: m.efficientformerv2_s0(num_classes=CLASSES, img_size=64),
        pixels=64,
    ),
    _timm("mobileone_s0"),
    _timm(
        "coat_lite_tiny",
        img_size=32,
        embed_dims=(16, 32, 48, 64),
        serial_depths=(1, 1, 1, 1),
        num_heads=8,
    ),
    _of_timm("tiny_vit", "tiny_vit", _tiny_vit, pixels=64),
)
