"""What leaves, what stays, and when it comes back; device and host are one here."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from meshfold.offload.host_link import HostLink
from meshfold.offload.saved_activations import SavedActivations

CPU = torch.device("cpu")


class NotingLink(HostLink):
    """away: what has left; order: bytes of what leaves (negative) and comes."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.away: list[weakref.ref[Tensor]] = []
        self.order: list[int] = []

    def on_host(self, source: Tensor) -> Tensor:
        target = super().on_host(source)
        self.away.append(weakref.ref(target))
        self.order.append(-source.nbytes)
        return target

    def back(self, source: Tensor) -> Tensor:
        self.order.append(source.nbytes)
        return super().back(source)


def detached(tensor: Tensor) -> Tensor:
    return tensor.detach()


def run(saved: SavedActivations, k: int, region: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Instance k, on x."""
    with saved.saving(k, [x]):
        result = region(x)
    saved.leave(k, [result])
    result.register_hook(lambda _: saved.enter(k))
    return result


def square_of_sine(x: Tensor) -> Tensor:
    """Saves x, which arrived, and sin(x) twice: for the product, and a view of it."""
    inside = torch.sin(x)
    return inside * inside.flatten().view(inside.shape)


def test_views_leave_once_and_what_arrived_or_is_returned_stays() -> None:
    link = NotingLink()
    saved = SavedActivations(link, [0], detached)
    x = torch.linspace(0, 1, 6, dtype=torch.float64).reshape(2, 3).requires_grad_()
    y = run(saved, 0, square_of_sine, x)
    assert link.order == [-6 * 8]
    y.sum().backward()
    assert link.order == [-6 * 8, 6 * 8]
    assert torch.equal(x.grad, torch.autograd.grad(square_of_sine(x).sum(), x)[0])
    # exp saves its own result, which is what the region returns.
    assert run(saved, 0, torch.exp, x).requires_grad and len(link.order) == 2


def test_what_an_instance_saved_comes_while_the_one_behind_runs_backward() -> None:
    """Numbers of 1, 2 and 3 elements; between them an instance that keeps what it saves: when its
    backward begins, the next ones come."""
    link = NotingLink()
    saved = SavedActivations(link, [0, 1, 3], detached)
    regions = [square_of_sine, lambda x: square_of_sine(torch.cat([x, x])), torch.sin]
    regions.append(lambda x: square_of_sine(torch.cat([x, x[:1]])))
    y = torch.ones(1, requires_grad=True)
    for k, region in enumerate(regions):
        y = run(saved, k, region, y)
    y.sum().backward()
    assert link.order == [-4, -8, -8, -12, -12, 12, 12, 8, 8, 4]


def test_the_memory_of_the_host_is_free_after_the_backward() -> None:
    link = NotingLink()
    saved = SavedActivations(link, [0], detached)
    y = run(saved, 0, square_of_sine, torch.ones(4, requires_grad=True))
    gc.collect()
    assert all(ref() is not None for ref in link.away)
    y.sum().backward()
    del y
    assert link.away and all(ref() is None for ref in link.away)


def test_a_forward_without_backward_leaves_nothing_behind() -> None:
    link = NotingLink()
    saved = SavedActivations(link, [0], detached)
    y = run(saved, 0, square_of_sine, torch.ones(4, requires_grad=True))
    del y
    gc.collect()
    assert link.away and all(ref() is None for ref in link.away)


def test_what_the_step_makes_again_stays_out() -> None:
    """Gathered parameters are not saved, but gathered again."""
    link = NotingLink()
    weight = torch.full((3,), 2.0)
    saved = SavedActivations(
        link, [0], lambda t: (lambda: weight) if t.data_ptr() == weight.data_ptr() else t.detach()
    )
    x = torch.ones(3, requires_grad=True)
    y = run(saved, 0, lambda x: x * weight, x)
    assert link.order == []
    y.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex128])
def test_strides_offsets_and_dtypes_come_back(dtype: torch.dtype) -> None:
    link = NotingLink()
    saved = SavedActivations(link, [0], detached)

    def region(x: Tensor) -> Tensor:
        inside = torch.sin(x).t()[1:]
        return (inside * inside.conj()).real.sum(dim=1)

    x = torch.linspace(0, 1, 12).reshape(3, 4).to(dtype).requires_grad_()
    y = run(saved, 0, region, x)
    assert link.num_bytes_to_host >= 12 * x.element_size()
    y.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(region(x).sum(), x)[0])
