"""Models of timm, torchvision, vit-pytorch, segmentation-models-pytorch and kornia."""

import importlib
from collections.abc import Callable
from typing import Any

import torch

from zoo.entry import CLASSES, Built, Entry, fits, images, segments


def _timm(name: str, pixels: int = 32, **fields: Any) -> Entry:
    def build() -> Built:
        timm = importlib.import_module("timm")
        return images(timm.create_model(name, num_classes=CLASSES, **fields), pixels)

    return Entry("timm", name, build)


def _of(library: str, name: str, module: str, build: Callable[[Any], Built]) -> Entry:
    """build: of the imported module."""
    return Entry(library, name, lambda: build(importlib.import_module(module)))


_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
_STAGES = {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)}
TIMM = (
    _timm("vit_tiny_patch16_224", **_VIT),
    _timm("vit_small_patch16_224", **_VIT, drop_path_rate=0.2, qk_norm=True, init_values=0.1),
    _timm("deit_tiny_distilled_patch16_224", **_VIT),
    _timm("beit_base_patch16_224", **_VIT),
    _timm("cait_xxs24_224", **_VIT),
    _timm("xcit_nano_12_p8_224", **_VIT),
    _timm("eva02_tiny_patch14_224", **{**_VIT, "num_heads": 2}),
    _timm("mixer_s16_224", img_size=32, patch_size=8, embed_dim=32, num_blocks=2),
    _timm("resmlp_12_224", img_size=32, patch_size=8, embed_dim=32, num_blocks=2),
    _timm("gmlp_ti16_224", img_size=32, patch_size=8, embed_dim=32, num_blocks=2),
    _timm(
        "swin_tiny_patch4_window7_224",
        img_size=32,
        window_size=4,
        embed_dim=16,
        depths=(2, 2),
        num_heads=(2, 4),
    ),
    _timm(
        "swinv2_tiny_window8_256",
        img_size=32,
        window_size=4,
        embed_dim=16,
        depths=(2, 2),
        num_heads=(2, 4),
    ),
    _timm("convnext_atto", **_STAGES),
    _timm("convnextv2_atto", **_STAGES, drop_path_rate=0.1),
    _timm("resnet18", channels=(8, 16, 24, 32), stem_width=8),
    _timm("resnet26d", layers=(1, 1, 1, 1), channels=(8, 16, 24, 32)),
    _timm("seresnet50", layers=(1, 1, 1, 1), channels=(8, 16, 24, 32)),
    _timm("regnetx_002"),
    _timm("mobilenetv3_small_050"),
    _timm("efficientnet_lite0", channel_multiplier=0.25, depth_multiplier=0.3, drop_path_rate=0.1),
    _timm("ghostnet_050"),
    _timm("mnasnet_small"),
    _timm("poolformer_s12", layers=(1, 1, 1, 1), embed_dims=(8, 16, 24, 32)),
    _timm("caformer_s18", depths=(1, 1, 1, 1), dims=(8, 16, 24, 32)),
    _timm("pvt_v2_b0", depths=(1, 1, 1, 1), embed_dims=(8, 16, 24, 32), num_heads=(1, 2, 3, 4)),
    _timm(
        "twins_svt_small", depths=(1, 1, 1, 1), embed_dims=(16, 16, 32, 32), num_heads=(2, 2, 2, 2)
    ),
    _timm("edgenext_xx_small", depths=(1, 1, 1, 1), dims=(8, 16, 24, 32), heads=(2, 2, 2, 2)),
    _timm("davit_tiny", depths=(1, 1), embed_dims=(16, 32), num_heads=(2, 4), window_size=4),
    _timm("focalnet_tiny_srf", depths=(1, 1, 1, 1), embed_dim=8),
    _timm("inception_next_atto", depths=(1, 1, 1, 1), dims=(8, 16, 24, 32)),
    _timm(
        "sequencer2d_s", layers=(1, 1, 1, 1), embed_dims=(16, 16, 16, 16), hidden_sizes=(4, 4, 4, 4)
    ),
    _timm("starnet_s1", base_dim=8, depths=(1, 1, 1, 1)),
    _timm("convmixer_768_32", dim=16, depth=2, patch_size=4),
    _timm("efficientformerv2_s0"),
    _timm("mobileone_s0"),
    _timm(
        "coat_lite_tiny",
        img_size=32,
        embed_dims=(8, 16, 24, 32),
        serial_depths=(1, 1, 1, 1),
        num_heads=4,
    ),
    _timm(
        "tiny_vit_5m_224",
        img_size=32,
        embed_dims=(16, 16, 32, 32),
        depths=(1, 1, 1, 1),
        num_heads=(1, 2, 2, 2),
        window_sizes=(4, 4, 2, 1),
    ),
)

_TV = "torchvision.models"


def _resnet(tv: Any, block: str, layers: list[int], **fields: Any) -> Built:
    module = tv.resnet
    return images(module.ResNet(getattr(module, block), layers, num_classes=CLASSES, **fields))


TORCHVISION = (
    _of("torchvision", "resnet10", _TV, lambda m: _resnet(m, "BasicBlock", [1, 1, 1, 1])),
    _of(
        "torchvision",
        "resnext14",
        _TV,
        lambda m: _resnet(m, "Bottleneck", [1, 1, 1, 1], groups=4, width_per_group=4),
    ),
    _of(
        "torchvision",
        "vit",
        _TV,
        lambda m: images(m.VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=CLASSES)),
    ),
    _of(
        "torchvision",
        "vit_with_dropout",
        _TV,
        lambda m: images(m.VisionTransformer(32, 8, 2, 4, 32, 64, 0.1, 0.1, num_classes=CLASSES)),
    ),
    _of(
        "torchvision",
        "swin",
        _TV,
        lambda m: images(
            m.SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], num_classes=CLASSES)
        ),
    ),
    _of(
        "torchvision",
        "swin_v2",
        _TV,
        lambda m: images(
            m.SwinTransformer(
                [4, 4],
                16,
                [2, 2],
                [2, 4],
                [4, 4],
                num_classes=CLASSES,
                block=m.swin_transformer.SwinTransformerBlockV2,
                downsample_layer=m.swin_transformer.PatchMergingV2,
            )
        ),
    ),
    _of(
        "torchvision",
        "convnext",
        _TV,
        lambda m: images(
            m.ConvNeXt(
                [m.convnext.CNBlockConfig(8, 16, 2), m.convnext.CNBlockConfig(16, None, 2)],
                0.1,
                num_classes=CLASSES,
            )
        ),
    ),
    _of(
        "torchvision",
        "densenet",
        _TV,
        lambda m: images(m.DenseNet(4, (2, 2), 8, num_classes=CLASSES)),
    ),
    _of(
        "torchvision",
        "mobilenet_v2",
        _TV,
        lambda m: images(m.MobileNetV2(CLASSES, width_mult=0.25)),
    ),
    _of(
        "torchvision",
        "mobilenet_v3_small",
        _TV,
        lambda m: images(m.mobilenet_v3_small(num_classes=CLASSES, width_mult=0.25)),
    ),
    _of(
        "torchvision",
        "shufflenet_v2",
        _TV,
        lambda m: images(m.ShuffleNetV2([2, 2, 2], [8, 16, 24, 32, 64], num_classes=CLASSES)),
    ),
    _of("torchvision", "mnasnet", _TV, lambda m: images(m.MNASNet(0.35, num_classes=CLASSES))),
    _of(
        "torchvision",
        "squeezenet",
        _TV,
        lambda m: images(m.squeezenet1_1(num_classes=CLASSES), 64),
    ),
    _of(
        "torchvision",
        "maxvit",
        _TV,
        lambda m: images(m.MaxVit((32, 32), 8, 4, [8, 16], [1, 1], 4, 0.1, num_classes=CLASSES)),
    ),
    _of("torchvision", "video_r3d", f"{_TV}.video.resnet", lambda m: _video(m)),
    _of(
        "torchvision",
        "lraspp",
        f"{_TV}.segmentation",
        lambda m: segments(
            m.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=CLASSES)
        ),
    ),
)


def _video(module: Any) -> Built:
    net = module.VideoResNet(
        module.BasicBlock,
        [module.Conv3DSimple] * 4,
        [1, 1, 1, 1],
        module.BasicStem,
        num_classes=CLASSES,
    )
    built, batch = images(net)
    return built, {**batch, "x": torch.randn(4, 3, 4, 16, 16)}


def _vit_pytorch(name: str, path: str, pixels: int = 32, **fields: Any) -> Entry:
    module, attribute = path.rsplit(".", 1)

    def build() -> Built:
        made = getattr(importlib.import_module(f"vit_pytorch.{module}"), attribute)
        return images(made(num_classes=CLASSES, **fields), pixels)

    return Entry("vit-pytorch", name, build)


_SMALL = {"image_size": 32, "patch_size": 8, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 64}
_PLAIN = {"dim": 32, "depth": 2, "heads": 4, "mlp_dim": 64}
VIT_PYTORCH = (
    _vit_pytorch("vit", "vit.ViT", **_SMALL, dropout=0.1),
    _vit_pytorch("simple_vit", "simple_vit.SimpleViT", **_SMALL),
    _vit_pytorch("deepvit", "deepvit.DeepViT", **_SMALL),
    _vit_pytorch("cait", "cait.CaiT", **_SMALL, cls_depth=1),
    _vit_pytorch(
        "cct", "cct.CCT", img_size=32, embedding_dim=32, num_layers=2, num_heads=4, mlp_ratio=2
    ),
    _vit_pytorch(
        "t2t",
        "t2t.T2TViT",
        dim=32,
        depth=2,
        heads=4,
        mlp_dim=64,
        image_size=32,
        t2t_layers=((7, 4), (3, 2)),
    ),
    _vit_pytorch(
        "pit", "pit.PiT", image_size=32, patch_size=8, dim=16, depth=(1, 1), heads=2, mlp_dim=32
    ),
    _vit_pytorch(
        "levit",
        "levit.LeViT",
        pixels=64,
        image_size=64,
        stages=2,
        dim=(16, 32),
        depth=1,
        heads=(2, 4),
        mlp_mult=2,
    ),
    _vit_pytorch(
        "cvt",
        "cvt.CvT",
        s1_emb_dim=8,
        s2_emb_dim=16,
        s3_emb_dim=32,
        s3_depth=1,
        s2_depth=1,
        s3_heads=2,
        s2_heads=2,
    ),
    _vit_pytorch(
        "twins_svt",
        "twins_svt.TwinsSVT",
        s1_emb_dim=8,
        s2_emb_dim=16,
        s3_emb_dim=16,
        s4_emb_dim=32,
        s1_local_patch_size=4,
        s2_local_patch_size=2,
        s3_local_patch_size=1,
        s4_local_patch_size=1,
        s2_global_k=2,
        s1_global_k=2,
        s3_global_k=1,
        s4_global_k=1,
        s1_patch_size=4,
        s2_patch_size=2,
        s3_patch_size=2,
        s4_patch_size=1,
        s3_depth=1,
    ),
    _vit_pytorch(
        "crossformer",
        "crossformer.CrossFormer",
        pixels=64,
        dim=(8, 16, 16, 32),
        depth=(1, 1, 1, 1),
        global_window_size=(2, 2, 2, 1),
        local_window_size=2,
    ),
    _vit_pytorch(
        "nest",
        "nest.NesT",
        image_size=32,
        patch_size=4,
        dim=8,
        heads=2,
        num_hierarchies=2,
        block_repeats=(1, 1),
    ),
    _vit_pytorch(
        "mobile_vit",
        "mobile_vit.MobileViT",
        image_size=(64, 64),
        pixels=64,
        dims=[16, 16, 16],
        channels=[8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 32],
    ),
    _vit_pytorch("xcit", "xcit.XCiT", **_SMALL, cls_depth=1),
    _vit_pytorch("local_vit", "local_vit.LocalViT", **_SMALL),
    _vit_pytorch("rvt", "rvt.RvT", **_SMALL),
    _vit_pytorch("parallel_vit", "parallel_vit.ViT", **_SMALL),
    _vit_pytorch(
        "sep_vit",
        "sep_vit.SepViT",
        pixels=32,
        dim=16,
        dim_head=8,
        heads=(1, 2),
        depth=(1, 1),
        window_size=4,
        dropout=0.1,
    ),
    _vit_pytorch(
        "max_vit",
        "max_vit.MaxViT",
        pixels=32,
        dim=16,
        depth=(1,),
        dim_head=8,
        window_size=4,
        dim_conv_stem=8,
    ),
    _vit_pytorch("simple_vit_registers", "simple_vit_with_register_tokens.SimpleViT", **_SMALL),
    _vit_pytorch("vit_small_dataset", "vit_for_small_dataset.ViT", **_SMALL),
    _vit_pytorch("vit_patch_dropout", "vit_with_patch_dropout.ViT", **_SMALL),
    _vit_pytorch("simple_vit_qk_norm", "simple_vit_with_qk_norm.SimpleViT", **_SMALL),
)


def _smp(name: str) -> Entry:
    def build() -> Built:
        smp = importlib.import_module("segmentation_models_pytorch")
        net = getattr(smp, name)("mobilenet_v2", encoder_weights=None, classes=CLASSES)
        return segments(net, 32 if name != "PAN" else 64)

    return Entry("segmentation-models", name.lower(), build)


SEGMENTATION = tuple(map(_smp, ("Unet", "FPN", "Linknet", "PSPNet", "DeepLabV3", "UnetPlusPlus")))

KORNIA = (
    _of(
        "kornia",
        "hardnet",
        "kornia.feature",
        lambda m: fits(m.HardNet(pretrained=False), torch.randn(4, 1, 32, 32), 4, 128),
    ),
    _of(
        "kornia",
        "sosnet",
        "kornia.feature",
        lambda m: fits(m.SOSNet(pretrained=False), torch.randn(4, 1, 32, 32), 4, 128),
    ),
    _of(
        "kornia",
        "tfeat",
        "kornia.feature",
        lambda m: fits(m.TFeat(pretrained=False), torch.randn(4, 1, 32, 32), 4, 128),
    ),
)
MODELS = (*TIMM, *TORCHVISION, *VIT_PYTORCH, *SEGMENTATION, *KORNIA)
