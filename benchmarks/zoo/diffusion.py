"""Models of diffusers."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zoo.entry import BATCH, CLASSES, Built, Entry, fits_named


def _diffusers(name: str, inputs: Callable[[], Built], **fields: Any) -> Entry:
    """inputs: a model of nothing with the inputs and target of the named one."""

    def build() -> Built:
        diffusers = importlib.import_module("diffusers")
        net = getattr(diffusers, name)(**fields)
        fitted, batch = inputs()
        fitted.model = net.train()
        return fitted, batch

    return Entry("diffusers", name, build)


def _noise(*shape: int) -> Tensor:
    return torch.randn(BATCH, *shape)


def _steps() -> Tensor:
    return torch.randint(0, 1000, (BATCH,))


def _denoises(
    shape: tuple[int, ...], out: tuple[int, ...] | None = None, **inputs: Any
) -> Callable[[], Built]:
    """inputs: callables that give the other inputs."""

    def build() -> Built:
        given = {name: make() for name, make in inputs.items()}
        key = given.pop("key", "sample")
        return fits_named(nn.Identity(), (BATCH, *(out or shape)), **{key: _noise(*shape)}, **given)

    return build


def _text(length: int = 6, width: int = 16) -> Callable[[], Tensor]:
    return lambda: _noise(length, width)


_BLOCKS = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
_CROSS = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 16,
    "attention_head_dim": 4,
}
_DIT = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2}
_CODER = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
}
_HIDDEN = lambda: "hidden_states"  # noqa: E731
MODELS = (
    _diffusers(
        "UNet2DModel",
        _denoises((3, 16, 16), timestep=_steps),
        sample_size=16,
        **_BLOCKS,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    ),
    _diffusers(
        "UNet2DConditionModel",
        _denoises((4, 16, 16), timestep=_steps, encoder_hidden_states=_text()),
        sample_size=16,
        **_BLOCKS,
        **_CROSS,
    ),
    _diffusers(
        "UNet1DModel",
        _denoises((14, 16), timestep=_steps),
        sample_size=16,
        in_channels=14,
        out_channels=14,
        block_out_channels=(8, 16),
        down_block_types=("DownResnetBlock1D",) * 2,
        up_block_types=("UpResnetBlock1D",),
        mid_block_type="MidResTemporalBlock1D",
        out_block_type="OutConv1DBlock",
        use_timestep_embedding=True,
        flip_sin_to_cos=False,
        act_fn="swish",
        time_embedding_type="positional",
    ),
    _diffusers(
        "UNet3DConditionModel",
        _denoises((4, 2, 16, 16), timestep=_steps, encoder_hidden_states=_text()),
        sample_size=16,
        **_BLOCKS,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        cross_attention_dim=16,
        attention_head_dim=4,
    ),
    _diffusers("AutoencoderKL", _denoises((3, 16, 16)), **_BLOCKS, **_CODER),
    _diffusers("VQModel", _denoises((3, 16, 16)), **_BLOCKS, **_CODER, num_vq_embeddings=16),
    _diffusers(
        "AutoencoderTiny",
        _denoises((3, 16, 16)),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
    ),
    _diffusers(
        "DiTTransformer2DModel",
        _denoises(
            (4, 8, 8),
            key=_HIDDEN,
            timestep=_steps,
            class_labels=lambda: torch.randint(0, CLASSES, (BATCH,)),
        ),
        **_DIT,
        in_channels=4,
        out_channels=4,
        norm_num_groups=4,
        sample_size=8,
        num_embeds_ada_norm=CLASSES,
    ),
    _diffusers(
        "PixArtTransformer2DModel",
        _denoises((4, 8, 8), key=_HIDDEN, timestep=_steps, encoder_hidden_states=_text(6, 32)),
        **_DIT,
        in_channels=4,
        out_channels=4,
        norm_num_groups=4,
        sample_size=8,
        cross_attention_dim=32,
        caption_channels=32,
        use_additional_conditions=False,
    ),
    _diffusers(
        "SD3Transformer2DModel",
        _denoises(
            (4, 8, 8),
            key=_HIDDEN,
            timestep=_steps,
            encoder_hidden_states=_text(6, 32),
            pooled_projections=lambda: _noise(16),
        ),
        **_DIT,
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=16,
        pos_embed_max_size=8,
    ),
    _diffusers(
        "FluxTransformer2DModel",
        _denoises(
            (8, 4),
            key=_HIDDEN,
            timestep=lambda: torch.rand(BATCH),
            encoder_hidden_states=_text(6, 32),
            pooled_projections=lambda: _noise(16),
            img_ids=lambda: torch.zeros(8, 3),
            txt_ids=lambda: torch.zeros(6, 3),
        ),
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        in_channels=4,
        joint_attention_dim=32,
        pooled_projection_dim=16,
        axes_dims_rope=(2, 2, 4),
    ),
    _diffusers(
        "AuraFlowTransformer2DModel",
        _denoises(
            (4, 8, 8),
            key=_HIDDEN,
            timestep=lambda: torch.rand(BATCH),
            encoder_hidden_states=_text(6, 16),
        ),
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=16,
        caption_projection_dim=32,
        pos_embed_max_size=64,
    ),
    _diffusers(
        "SanaTransformer2DModel",
        _denoises((4, 8, 8), key=_HIDDEN, timestep=_steps, encoder_hidden_states=_text(6, 16)),
        in_channels=4,
        out_channels=4,
        **_DIT,
        num_cross_attention_heads=4,
        cross_attention_head_dim=8,
        cross_attention_dim=32,
        caption_channels=16,
        sample_size=8,
    ),
    _diffusers(
        "LTXVideoTransformer3DModel",
        _denoises(
            (8, 4),
            key=_HIDDEN,
            timestep=_steps,
            encoder_hidden_states=_text(6, 32),
            encoder_attention_mask=lambda: torch.ones(BATCH, 6),
            num_frames=lambda: 2,
            height=lambda: 2,
            width=lambda: 2,
        ),
        **_DIT,
        in_channels=4,
        out_channels=4,
        cross_attention_dim=32,
        caption_channels=32,
    ),
    _diffusers(
        "WanTransformer3DModel",
        _denoises((4, 1, 8, 8), key=_HIDDEN, timestep=_steps, encoder_hidden_states=_text(6, 16)),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
    ),
    _diffusers(
        "CogVideoXTransformer3DModel",
        _denoises((1, 4, 8, 8), key=_HIDDEN, timestep=_steps, encoder_hidden_states=_text(6, 16)),
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=16,
        num_layers=2,
        sample_width=8,
        sample_height=8,
        sample_frames=1,
        max_text_seq_length=6,
    ),
    _diffusers(
        "PriorTransformer",
        _denoises(
            (16,),
            key=_HIDDEN,
            timestep=_steps,
            proj_embedding=lambda: _noise(16),
            encoder_hidden_states=_text(),
        ),
        **_DIT,
        embedding_dim=16,
        num_embeddings=6,
    ),
)
