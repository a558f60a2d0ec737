"""A model that draws random numbers in the ways that people write them."""

import torch
from torch import Tensor, nn
from torch.nn import functional

ROWS, POSITIONS, WIDTH = 8, 4, 8


def timm_drop_path(x: Tensor, drop: float) -> Tensor:
    keep = 1 - drop
    kept = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
    if keep > 0.0:
        kept.div_(keep)
    return x * kept


def transformers_drop_path(x: Tensor, drop: float) -> Tensor:
    keep = 1 - drop
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    kept = keep + torch.rand(shape, dtype=x.dtype, device=x.device)
    return x.div(keep) * kept.floor_()


def torchvision_drop_path(x: Tensor, drop: float) -> Tensor:
    """torchvision.ops.stochastic_depth in mode "row"."""
    survival = 1.0 - drop
    noise = torch.empty([x.shape[0]] + [1] * (x.ndim - 1), dtype=x.dtype, device=x.device)
    noise = noise.bernoulli_(survival)
    return x * noise.div_(survival)


DROP_PATHS = (timm_drop_path, transformers_drop_path, torchvision_drop_path)


class Block(nn.Module):
    """Two linears with noise between them, dropped in some samples. The rate differs by layer, as
    it does in vision transformers."""

    def __init__(self, rate: float, style: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.channels = nn.Dropout1d(rate)
        self.drop_prob, self.style = rate, style

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x))
        hidden = hidden * (1.0 + 0.1 * torch.randn_like(hidden)) + 0.1 * torch.rand(POSITIONS, 1)
        y = self.down(self.channels(hidden))
        return x + (DROP_PATHS[self.style](y, self.drop_prob) if self.training else y)


class Drawing(nn.Module):
    """Blocks, a Gumbel softmax, gates drawn with learned probabilities; a mean square."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            Block(0.1 + 0.2 * k / num_layers, k % 3 if num_layers == 3 else 0)
            for k in range(num_layers)
        )
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.alpha = nn.AlphaDropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        shift = torch.empty(WIDTH).uniform_(-0.1, 0.1)
        for block in self.blocks:
            x = block(x) + shift
        gates = torch.bernoulli(torch.sigmoid(self.gate(x)).detach())
        chosen = functional.gumbel_softmax(self.gate(x), tau=0.7)
        noise = torch.normal(0.0, 0.5, x.shape) + torch.randint(0, 3, x.shape[1:])
        return (self.alpha(x * gates) + chosen * noise).square().mean()


class LayerDrop(nn.Module):
    """A model that is skipped in some steps, by a branch in Python."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        dropout_probability = torch.rand([])
        if self.training and dropout_probability < 0.5:
            return x.mean()
        y: Tensor = self.layer(x)
        return y


def drawing_model(num_layers: int = 3) -> tuple[nn.Module, dict[str, Tensor]]:
    """A Drawing in float64 and train mode, and a batch for it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Drawing(num_layers).double().train()
        x = torch.randn(ROWS, POSITIONS, WIDTH, dtype=torch.float64)
    return model, {"x": x}


def drop_path() -> tuple[nn.Module, dict[str, Tensor]]:
    """A factory for verify: a Drawing in float32."""
    model, batch = drawing_model()
    return model.float(), {"x": batch["x"].float()}
