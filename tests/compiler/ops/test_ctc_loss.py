"""The op ctc_loss against torch's, losses and gradients."""

import torch
from torch.nn import functional as F

from meshfold.ops.ctc_loss import ctc_losses


def test_losses_and_gradients_are_those_of_torch() -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 3, 5, dtype=torch.float64, requires_grad=True)
    targets, lengths = torch.randint(1, 5, (3, 4)), torch.tensor([7, 5, 3])
    counts = torch.tensor([4, 0, 2])
    log_probs = x.log_softmax(-1)
    made = ctc_losses(log_probs, targets, lengths, counts, 0, False)
    wanted = F.ctc_loss(log_probs, targets, lengths, counts, reduction="none")
    assert torch.equal(made, wanted)
    weights = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    gradients = [
        torch.autograd.grad((y * weights).sum(), x, retain_graph=True)[0] for y in (made, wanted)
    ]
    assert torch.allclose(*gradients, rtol=0, atol=1e-14)


def test_on_fake_tensors_it_has_a_shape() -> None:
    x = torch.empty(7, 3, 5, device="meta")
    counts = torch.empty(3, dtype=torch.long, device="meta")
    targets = torch.empty(3, 4, dtype=torch.long, device="meta")
    assert ctc_losses(x, targets, counts, counts, 0, True).shape == (3,)
