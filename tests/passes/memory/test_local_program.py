"""What is probed for the ops of one rank."""

import pytest
from torch import Tensor, nn, randn, zeros
from torch.nn import functional

from meshfold.capture.pipeline import capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.ir.options import CompileOptions
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.planner.find import find_plan_for

ROWS, WIDTH, CLASSES = 64, 16, 4096


class WeightedHead(nn.Module):
    """A vocabulary that plans keep sharded up to the loss, and a weight of each class."""

    def __init__(self, is_wide: bool) -> None:
        super().__init__()
        self.is_wide = is_wide
        self.head = nn.Linear(WIDTH, CLASSES).bfloat16() if is_wide else nn.Linear(WIDTH, CLASSES)
        self.register_buffer("weight", zeros(CLASSES))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(x)
        logits = logits.float() if self.is_wide else logits
        return functional.cross_entropy(logits, labels, self.weight)


@pytest.mark.parametrize(
    ("is_wide", "is_chunked", "loss"),
    [
        (False, 0, "meshfold.cross_entropy.default"),
        (True, 0, "meshfold.cross_entropy.default"),
        (False, 1, "meshfold.linear_cross_entropy.default"),
    ],
)
def test_class_weights_are_those_of_the_ranks_classes(
    is_wide: bool, is_chunked: int, loss: str
) -> None:
    class Probe(OpProber):
        def __call__(self, key):
            if key.target == loss:
                seen.add(key.operands[-1].shape)
            return super().__call__(key)

    seen: set[tuple[int, ...]] = set()
    model = WeightedHead(is_wide)
    x = randn(ROWS, WIDTH, dtype=model.head.weight.dtype)
    pins = {"tp": 2, "dp": 1, "chunked_loss": is_chunked}
    find_plan_for(
        capture(model, {"x": x, "labels": zeros(ROWS).long()}).graph,
        resolve_cluster("local-cpu", 2),
        CompileOptions(pins=pins),
        model_name="head",
        batch_size=ROWS,
        probe=Probe(),
    )
    assert (CLASSES // 2,) in seen
