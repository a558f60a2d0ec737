"""What is known while a model is traced, and what is not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from meshfold.capture.pipeline import capture
from meshfold.errors import CaptureError
from meshfold.validation.captured_alone import captured_step

N = torch.tensor([2, 0, 3])


class Model(nn.Module):
    """`body` of x [5, 4] and n [3], times a weight."""

    def __init__(self, body: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.body = body
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        return (self.body(x, n) * self.weight).sin().sum()


def _writes_known(x: Tensor, n: Tensor) -> Tensor:
    n[0] = 5
    flags = torch.zeros_like(x[:, 0])
    flags[1:3] = 1
    return x[: n[0].item() - 1] + flags.sum() * x[flags.bool()].sum()


KNOWN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "branch": lambda x, n: x if (n > 2).any() else -x,
    "split": lambda x, n: torch.cat([p.cumsum(0) for p in x.split(n.tolist())]),
    "slice": lambda x, n: x[n[1] : n[0]],
    "loop": lambda x, n: torch.stack([x[k] * float(k) for k in n]),
    "range": lambda x, n: x[torch.arange(n.max())],
    "nonzero": lambda x, n: x[n.nonzero().squeeze(-1)],
    "mask": lambda x, n: x[:3][n > 0],
    "all of a mask": lambda x, n: x[:3][n >= 0],
    "repeats": lambda x, n: x[:3].repeat_interleave(n, dim=0),
    "reshape": lambda x, n: x[:4].reshape(n[0], -1),
    "write": _writes_known,
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_known_values_decide_is_that_of_one_process(name: str) -> None:
    torch.manual_seed(0)
    model, x = Model(KNOWN[name]).double(), torch.randn(5, 4, dtype=torch.float64)
    right = model(x, N.clone())
    captured = capture(model, {"x": x, "n": N}, fixed_inputs=["n"])
    found, _ = captured_step(
        captured.graph, captured.constants, dict(model.named_parameters()), {}, {"x": x}
    )
    assert abs(found.sum() - right).item() <= 1e-12
    assert N.tolist() == [2, 0, 3]


def _writes_unknown(x: Tensor, n: Tensor) -> Tensor:
    n[1:] = (x[:2, 0] > 0).long()
    return x[: n[2].item()]


UNKNOWN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "written": _writes_unknown,
    "of the batch": lambda x, n: x if (x[:3, 0] > n).any() else -x,
    "drawn": lambda x, n: x if torch.rand_like(n.double()).sum() > 1 else -x * 2,
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_is_refused(name: str) -> None:
    with pytest.raises(CaptureError):
        capture(Model(UNKNOWN[name]), {"x": torch.randn(5, 4), "n": N}, fixed_inputs=["n"])


def test_constants_are_known_without_fixed_inputs() -> None:
    def body(x: Tensor, n: Tensor) -> Tensor:
        return x if torch.ones(3).sum() == 3 and n.numel() else -x

    captured = capture(Model(body), {"x": torch.randn(5, 4), "n": N})
    assert [op.target for op in captured.graph.regions[0].graph.ops][-1].startswith("aten.sum")
