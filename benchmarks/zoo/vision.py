"""Models of torchvision, vit-pytorch, segmentation-models-pytorch and kornia."""

import importlib.util
from typing import Any

import torch

from zoo.entry import CLASSES, Built, Entry, fits, images, of, segments

# What torchvision asks for while it is imported. Where its compiled ops are of another release of
# torch they are not there, although its models are plain Python.
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def _defined() -> torch.library.Library | None:
    """The library with them, which lives as long as it is held; None without torchvision."""
    if importlib.util.find_spec("torchvision") is None:
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS:
        library.define(schema)
    return library


_LIBRARY = _defined()
_TV = "torchvision.models"


def _resnet(tv: Any, block: str, layers: list[int], **fields: Any) -> Built:
    module = tv.resnet
    return images(module.ResNet(getattr(module, block), layers, num_classes=CLASSES, **fields))


TORCHVISION = (
    of("torchvision", "resnet10", _TV, lambda m: _resnet(m, "BasicBlock", [1, 1, 1, 1])),
    of(
        "torchvision",
        "resnext14",
        _TV,
        lambda m: _resnet(m, "Bottleneck", [1, 1, 1, 1], groups=4, width_per_group=4),
    ),
    of(
        "torchvision",
        "vit",
        _TV,
        lambda m: images(m.VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=CLASSES)),
    ),
    of(
        "torchvision",
        "vit_with_dropout",
        _TV,
        lambda m: images(m.VisionTransformer(32, 8, 2, 4, 32, 64, 0.1, 0.1, num_classes=CLASSES)),
    ),
    of(
        "torchvision",
        "swin",
        _TV,
        lambda m: images(
            m.SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], num_classes=CLASSES)
        ),
    ),
    of(
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
    of(
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
    of(
        "torchvision",
        "densenet",
        _TV,
        lambda m: images(m.DenseNet(4, (2, 2), 8, num_classes=CLASSES)),
    ),
    of(
        "torchvision",
        "mobilenet_v2",
        _TV,
        lambda m: images(m.MobileNetV2(CLASSES, width_mult=0.25)),
    ),
    of(
        "torchvision",
        "mobilenet_v3_small",
        _TV,
        lambda m: images(m.mobilenet_v3_small(num_classes=CLASSES, width_mult=0.25)),
    ),
    of(
        "torchvision",
        "shufflenet_v2",
        _TV,
        lambda m: images(m.ShuffleNetV2([2, 2, 2], [8, 16, 24, 32, 64], num_classes=CLASSES)),
    ),
    of("torchvision", "mnasnet", _TV, lambda m: images(m.MNASNet(0.35, num_classes=CLASSES))),
    of(
        "torchvision",
        "squeezenet",
        _TV,
        lambda m: images(m.squeezenet1_1(num_classes=CLASSES), 64),
    ),
    of(
        "torchvision",
        "maxvit",
        _TV,
        lambda m: images(m.MaxVit((32, 32), 8, 4, [8, 16], [1, 1], 4, 0.1, num_classes=CLASSES)),
    ),
    of("torchvision", "video_r3d", f"{_TV}.video.resnet", lambda m: _video(m)),
    of(
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
        dim=(32, 32, 64, 64),
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
        pixels=56,
        dim=16,
        dim_head=8,
        heads=(1, 2),
        depth=(1, 1),
        window_size=7,
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
    of(
        "kornia",
        "hardnet",
        "kornia.feature",
        lambda m: fits(m.HardNet(pretrained=False), torch.randn(4, 1, 32, 32), 4, 128),
    ),
    of(
        "kornia",
        "sosnet",
        "kornia.feature",
        lambda m: fits(m.SOSNet(pretrained=False), torch.randn(4, 1, 32, 32), 4, 128),
    ),
    of(
        "kornia",
        "tfeat",
        "kornia.feature",
        lambda m: fits(m.TFeat(pretrained=False), torch.randn(4, 1, 32, 32), 4, 128),
    ),
)
MODELS = (*TORCHVISION, *VIT_PYTORCH, *SEGMENTATION, *KORNIA)
