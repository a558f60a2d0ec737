"""Copies that have memory while somebody needs them."""

import pytest
import torch
from torch import Tensor, nn

from meshfold.errors import MeshfoldError
from meshfold.offload.host_link import HostLink
from meshfold.offload.layer_copies import LayerCopies


def made(*names: str) -> tuple[LayerCopies, dict[str, Tensor], dict[str, Tensor]]:
    """(copies, the device's tensors, the host's)."""
    device = {name: nn.Parameter(torch.empty(4)) for name in names}
    for tensor in device.values():
        tensor.untyped_storage().resize_(0)
    stored = {name: nn.Parameter(torch.full((4,), 1.0 + k)) for k, name in enumerate(names)}
    copies = LayerCopies(HostLink(torch.device("cpu")), device)
    copies.begin(stored)
    return copies, device, stored


def test_two_layers_are_there_at_a_time() -> None:
    copies, device, stored = made("a", "b", "c")
    copies.hold([device["a"]], [device["b"]])
    assert copies.num_bytes == 32 and torch.equal(device["b"], stored["b"])
    copies.hold([device["b"], torch.ones(2)], [device["c"]])
    assert copies.num_bytes == 32 and device["a"].untyped_storage().nbytes() == 0
    copies.hold(())
    assert copies.num_bytes == 0 and torch.ones(1) not in copies


def test_autograd_finds_what_has_gone() -> None:
    copies, device, stored = made("a")
    copies.hold([device["a"]])

    def note(x: Tensor) -> object:
        return copies.note(x) or x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x() if callable(x) else x):
        loss = (device["a"].view(2, 2).t() ** 2).sum()
    copies.hold(())
    loss.backward()
    assert torch.equal(device["a"].grad, 2 * stored["a"])


def test_what_others_hold_stays_and_is_renewed() -> None:
    copies, device, stored = made("a", "b")
    copies.hold([device["a"]], [device["b"]])
    copies.keep([device["a"].detach().view(2, 2), torch.ones(1)])
    assert copies.note(device["b"].detach().view(torch.int32)) is None, "no note can say its dtype"
    copies.hold(())
    assert copies.num_bytes == 32 and torch.equal(device["a"], stored["a"])
    with torch.no_grad():
        stored["a"].fill_(7.0)
    copies.begin(stored)
    assert copies.num_bytes == 32 and device["a"].tolist() == [7.0] * 4


def test_a_parameter_that_was_changed_is_not_read_again() -> None:
    copies, device, stored = made("a")
    copies.hold([device["a"]])
    again = copies.note(device["a"])
    assert again is not None
    with torch.no_grad():
        stored["a"].add_(1.0)
    with pytest.raises(MeshfoldError, match="parameter a was changed between forward and backward"):
        again()
