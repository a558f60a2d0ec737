"""One small model under many losses, compared with one process."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

import meshfold
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.training.shards.local_shard import local_tensor
from support.programs.emit import part_of

ROWS, WIDTH, CLASSES = 8, 8, 12

Loss = Callable[[Tensor, Mapping[str, Tensor]], Tensor]

LOSSES: dict[str, Loss] = {
    "mean square": lambda y, t: functional.mse_loss(y, t["real"]),
    "absolute": lambda y, t: functional.l1_loss(y, t["real"]),
    "huber": lambda y, t: functional.smooth_l1_loss(y, t["real"], beta=0.3),
    "binary": lambda y, t: functional.binary_cross_entropy_with_logits(y, t["share"]),
    "divergence": lambda y, t: functional.kl_div(
        y.log_softmax(-1), t["share"], reduction="batchmean"
    ),
    "classes": lambda y, t: functional.cross_entropy(y, t["label"]),
    "smoothed": lambda y, t: functional.cross_entropy(y, t["label"], label_smoothing=0.1),
    "by class": lambda y, t: functional.cross_entropy(y, t["label"], t["weight"]),
    "weighted": lambda y, t: functional.cross_entropy(
        y, t["label"], t["weight"], label_smoothing=0.1
    ),
    "probabilities": lambda y, t: functional.cross_entropy(y, t["share"]),
    "likelihood": lambda y, t: functional.nll_loss(y.log_softmax(-1), t["label"]),
    "similarity": lambda y, t: 1 - functional.cosine_similarity(y, t["real"], dim=-1).mean(),
}


class Trained(nn.Module):
    """x [rows, width] -> one of LOSSES."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        self.loss = LOSSES[loss]
        self.first = nn.Linear(WIDTH, 4 * WIDTH)
        self.head = nn.Linear(4 * WIDTH, CLASSES)
        generator = torch.Generator().manual_seed(5)
        self.register_buffer("weight", torch.rand(CLASSES, generator=generator) + 0.1)

    def forward(self, x: Tensor, real: Tensor, share: Tensor, label: Tensor) -> Tensor:
        targets = {"real": real, "share": share, "label": label, "weight": self.weight}
        return self.loss(self.head(self.first(x).tanh()), targets)


def trained_model(loss: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model in float64 and its batch, with labels of which unevenly many count."""
    generator = torch.Generator().manual_seed(3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Trained(loss).double()
    label = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    label[1] = label[2] = -100
    share = torch.rand(ROWS, CLASSES, generator=generator, dtype=torch.float64)
    return model, {
        "x": torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64),
        "real": torch.randn(ROWS, CLASSES, generator=generator, dtype=torch.float64),
        "share": share.softmax(-1),
        "label": label,
    }


def largest_errors(losses: list[str], pins: Mapping[str, int]) -> list[float]:
    """The largest error of the loss and of any gradient after one step, by loss."""
    world = torch.distributed.get_world_size()
    cluster = resolve_cluster("local-cpu", world)
    found = []
    for loss in losses:
        model, batch = trained_model(loss)
        expected = model(**batch)
        expected.backward()
        options = meshfold.CompileOptions(pins=pins)
        compiled = meshfold.compile(model, cluster, batch, options=options)
        errors = [float((compiled.train_step(batch) - expected.detach()).abs())]
        for name, parameter in compiled.named_parameters():
            whole = model.get_parameter(name).grad
            assert whole is not None and parameter.grad is not None
            errors.append(
                float((local_tensor(parameter.grad) - part_of(compiled, name, whole)).abs().max())
            )
        found.append(max(errors))
        compiled.close()
    return found
