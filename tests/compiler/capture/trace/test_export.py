"""What a plain export would not take."""

import torch
from torch import Tensor, nn

from meshfold.capture.pipeline import capture
from meshfold.ops.reference_interpreter import run_graph


class Shared(nn.Module):
    """One batch norm in two places, under two names. keeps: whether its statistics are saved."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(3)
        if not keeps:
            norm._non_persistent_buffers_set.update(dict(norm.named_buffers()))
        self.layers = nn.Sequential(nn.Linear(3, 3), norm, nn.Tanh(), nn.Linear(3, 3), norm)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x).pow(3).mean()
        return found


def test_a_batch_norm_in_two_places_is_captured() -> None:
    for keeps in (True, False):
        model, x = Shared(keeps).double(), torch.randn(4, 3, dtype=torch.float64)
        captured = capture(model, {"x": x})
        assert len(captured.graph.buffers) == 3
        parameters = dict(model.named_parameters())
        buffers = {name: b.clone() for name, b in model.named_buffers()}
        made = run_graph(captured.graph, parameters, buffers, captured.constants, {"x": x})
        assert torch.allclose(*made.values(), model(x), rtol=1e-12)
        for name, right in model.named_buffers():
            assert torch.allclose(buffers[name].double(), right.double(), rtol=1e-12), name
