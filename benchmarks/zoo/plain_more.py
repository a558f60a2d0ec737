"""What benchmarks/zoo/plain_fields.py and plain_nets have, and small nets of torch's own layers."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from zoo import plain_fields as fields
from zoo import plain_nets as nets
from zoo.entry import BATCH, CLASSES, Built, Entry, fits, fits_named, images, segments
from zoo.plain import CausalAttention


def _rows(*shape: int) -> Tensor:
    return torch.randn(BATCH, *shape)


def _mlp(inner: int, outer: int, act: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    layers = [nn.Linear(inner, 32), act(), nn.Linear(32, 32), act(), nn.Linear(32, outer)]
    return nn.Sequential(*layers)


def _maxout() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 32),
        nn.Unflatten(1, (8, 4)),
        nn.AdaptiveMaxPool1d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


def _is(name: str, build: Callable[[], Built]) -> Entry:
    return Entry("torch", name, build)


def _loss(model: nn.Module, **batch: Tensor) -> Built:
    return model.train(), batch


def _clicked() -> Tensor:
    return torch.randint(0, 2, (BATCH,)).float()


def _ids(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, (BATCH, *shape))


def _edges() -> Built:
    source, to = torch.randint(0, 8, (2, 20))
    inputs = {"nodes": torch.randn(8, 16), "source": source, "to": to, "length": torch.rand(20)}
    return fits_named(fields.Messages(), (8, 4), **inputs)


def _adjacency() -> Tensor:
    return (torch.rand(BATCH, 6, 6) < 0.5).float()


MODELS = (
    _is("unet", lambda: segments(fields.UNet())),
    _is("unet_group_norm", lambda: segments(fields.UNet(lambda n: nn.GroupNorm(4, n)))),
    _is(
        "resnet_plain",
        lambda: images(
            nn.Sequential(
                nn.Conv2d(3, 16, 3, 2, 1),
                *(fields.Residual(16) for _ in range(3)),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
                nn.Linear(16, CLASSES),
            )
        ),
    ),
    _is(
        "lenet",
        lambda: images(
            nn.Sequential(
                nn.Conv2d(3, 6, 5),
                nn.Tanh(),
                nn.AvgPool2d(2),
                nn.Conv2d(6, 16, 5),
                nn.Tanh(),
                nn.AvgPool2d(2),
                nn.Flatten(),
                nn.Linear(400, 120),
                nn.Tanh(),
                nn.Linear(120, CLASSES),
            )
        ),
    ),
    _is(
        "vgg_like",
        lambda: images(
            nn.Sequential(
                *(
                    nn.Sequential(
                        nn.Conv2d(a, b, 3, padding=1),
                        nn.BatchNorm2d(b),
                        nn.ReLU(True),
                        nn.MaxPool2d(2),
                    )
                    for a, b in ((3, 8), (8, 16), (16, 32))
                ),
                nn.Flatten(),
                nn.Dropout(),
                nn.Linear(512, CLASSES),
            )
        ),
    ),
    _is(
        "vit_plain",
        lambda: images(
            fields.Patches(
                *(
                    nn.TransformerEncoderLayer(
                        32, 4, 64, 0.1, "gelu", batch_first=True, norm_first=True
                    )
                    for _ in range(2)
                )
            )
        ),
    ),
    _is("autoencoder", lambda: fits(nn.Sequential(_mlp(48, 8), _mlp(8, 48)), _rows(48), BATCH, 48)),
    _is(
        "conv_autoencoder",
        lambda: fits(
            nn.Sequential(
                nn.Conv2d(3, 8, 3, 2, 1),
                nn.ReLU(),
                nn.Conv2d(8, 16, 3, 2, 1),
                nn.ReLU(),
                nn.ConvTranspose2d(16, 8, 4, 2, 1),
                nn.ReLU(),
                nn.ConvTranspose2d(8, 3, 4, 2, 1),
            ),
            _rows(3, 16, 16),
            BATCH,
            3,
            16,
            16,
        ),
    ),
    _is("vae", lambda: _loss(fields.Variational(), x=_rows(48))),
    _is("vq_vae", lambda: _loss(fields.VectorQuantized(), x=_rows(3, 16, 16))),
    _is("dcgan_generator", lambda: fits(fields.Generator(), _rows(16, 1, 1), BATCH, 3, 16, 16)),
    _is(
        "discriminator",
        lambda: fits(
            nn.Sequential(
                nn.Conv2d(3, 8, 4, 2, 1),
                nn.LeakyReLU(0.2),
                nn.Conv2d(8, 16, 4, 2, 1),
                nn.InstanceNorm2d(16, affine=True),
                nn.LeakyReLU(0.2),
                nn.Flatten(),
                nn.Linear(256, 1),
            ),
            _rows(3, 16, 16),
            BATCH,
            1,
        ),
    ),
    _is(
        "dit_plain",
        lambda: fits_named(
            fields.DiffusionTransformer(),
            (BATCH, 3, 16, 16),
            noisy=_rows(3, 16, 16),
            t=_ids(1000),
            y=_ids(CLASSES),
        ),
    ),
    _is("real_nvp", lambda: _loss(fields.Coupling(), x=_rows(8))),
    _is(
        "dlrm",
        lambda: _loss(fields.Recommender(), dense=_rows(8), sparse=_ids(40, 3), clicked=_clicked()),
    ),
    _is(
        "dlrm_bags",
        lambda: _loss(
            fields.Recommender(bags=True), dense=_rows(8), sparse=_ids(40, 3, 2), clicked=_clicked()
        ),
    ),
    _is("deep_fm", lambda: _loss(fields.Factorized(), fields=_ids(60, 3), clicked=_clicked())),
    _is(
        "nerf",
        lambda: _loss(fields.Radiance(), origin=_rows(3), direction=_rows(3), target=_rows(3)),
    ),
    _is(
        "siren",
        lambda: fits(
            nn.Sequential(fields.Sine(2, 32), fields.Sine(32, 32), nn.Linear(32, 3)),
            _rows(2),
            BATCH,
            3,
        ),
    ),
    _is(
        "graph_convolution",
        lambda: _loss(
            fields.DenseGraph(), nodes=_rows(6, 16), adjacency=_adjacency(), target=_rows(4)
        ),
    ),
    _is(
        "graph_attention",
        lambda: _loss(
            fields.DenseGraph(4), nodes=_rows(6, 16), adjacency=_adjacency(), target=_rows(4)
        ),
    ),
    _is("message_passing", _edges),
    _is("point_net", lambda: fits(fields.PointNet(), _rows(3, 12), BATCH, 4)),
    _is(
        "deep_operator",
        lambda: fits_named(
            fields.DeepOperator(), (BATCH, 6), sensors=_rows(16), points=_rows(6, 2)
        ),
    ),
    _is(
        "fourier_operator",
        lambda: fits(
            nn.Sequential(
                nn.Conv2d(1, 8, 1),
                fields.SpectralConvolution(),
                fields.SpectralConvolution(),
                nn.Conv2d(8, 1, 1),
            ),
            _rows(1, 8, 8),
            BATCH,
            1,
            8,
            8,
        ),
    ),
    _is("neural_ode", lambda: fits(fields.NeuralOde(), _rows(8), BATCH, 8)),
    _is("contrastive", lambda: _loss(nets.Contrastive(), a=_rows(16), b=_rows(16))),
    _is("capsules", lambda: images(nets.Capsules(), 32)),
    _is("perceiver", lambda: fits(nets.Perceiver(), _rows(10, 8), BATCH, 4)),
    _is("set_transformer", lambda: fits(nets.SetAttention(), _rows(10, 8), BATCH, 4)),
    _is("conv_lstm", lambda: fits(nets.ConvLstm(), _rows(3, 3, 8, 8), BATCH, 3, 8, 8)),
    _is(
        "kan",
        lambda: fits(nn.Sequential(nets.Splines(8, 16), nets.Splines(16, 4)), _rows(8), BATCH, 4),
    ),
    _is("hyper_network", lambda: fits(nets.Hyper(), _rows(8), BATCH, 4)),
    _is(
        "skip_gram",
        lambda: _loss(nets.SkipGram(), center=_ids(64), context=_ids(64), negative=_ids(64, 5)),
    ),
    _is(
        "lora_by_hand",
        lambda: fits(
            nn.Sequential(
                nets.LowRank(nn.Linear(16, 32)),
                nn.GELU(),
                nets.LowRank(nn.Linear(32, 32)),
                nn.GELU(),
                nets.LowRank(nn.Linear(32, 4)),
            ),
            _rows(16),
            BATCH,
            4,
        ),
    ),
    _is("frozen_half", lambda: fits(nets.FrozenHalf(), _rows(16), BATCH, 4)),
    _is("mixture_density", lambda: _loss(nets.Mixture(), x=_rows(8), y=_rows(1))),
    _is("mlp", lambda: fits(_mlp(16, 4), _rows(16), BATCH, 4)),
    _is("mlp_selu", lambda: fits(_mlp(16, 4, nn.SELU), _rows(16), BATCH, 4)),
    _is("mlp_mish", lambda: fits(_mlp(16, 4, nn.Mish), _rows(16), BATCH, 4)),
    _is("mlp_prelu", lambda: fits(_mlp(16, 4, nn.PReLU), _rows(16), BATCH, 4)),
    _is(
        "mlp_weight_norm",
        lambda: fits(
            nn.Sequential(
                nn.utils.parametrizations.weight_norm(nn.Linear(16, 32)),
                nn.Softplus(),
                nn.Linear(32, 4),
            ),
            _rows(16),
            BATCH,
            4,
        ),
    ),
    _is("maxout", lambda: fits(_maxout(), _rows(16), BATCH, 4)),
    _is(
        "glu",
        lambda: fits(
            nn.Sequential(nn.Linear(16, 64), nn.GLU(), nn.Linear(32, 4)), _rows(16), BATCH, 4
        ),
    ),
    _is(
        "bilinear",
        lambda: fits_named(nn.Bilinear(8, 8, 4), (BATCH, 4), input1=_rows(8), input2=_rows(8)),
    ),
    _is(
        "conv3d",
        lambda: fits(
            nn.Sequential(
                nn.Conv3d(2, 8, 3, padding=1),
                nn.BatchNorm3d(8),
                nn.ReLU(),
                nn.AdaptiveAvgPool3d(1),
                nn.Flatten(),
                nn.Linear(8, 4),
            ),
            _rows(2, 4, 8, 8),
            BATCH,
            4,
        ),
    ),
    _is(
        "super_resolution",
        lambda: fits(
            nn.Sequential(
                nn.Conv2d(3, 16, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(16, 12, 3, padding=1),
                nn.PixelShuffle(2),
            ),
            _rows(3, 8, 8),
            BATCH,
            3,
            16,
            16,
        ),
    ),
    _is(
        "upsampling",
        lambda: fits(
            nn.Sequential(
                nn.Conv2d(3, 8, 3, padding=1),
                nn.Upsample(scale_factor=2, mode="bilinear"),
                nn.Conv2d(8, 3, 3, padding=1),
            ),
            _rows(3, 8, 8),
            BATCH,
            3,
            16,
            16,
        ),
    ),
    _is(
        "blocks_of_attention",
        lambda: fits(
            nn.Sequential(CausalAttention(), CausalAttention()), _rows(8, 32), BATCH, 8, 32
        ),
    ),
)
