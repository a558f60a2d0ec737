"""A call at the end of the backward that runs."""

import torch

from meshfold.torch_compat.backward_end import at_end_of_backward


def test_it_comes_when_all_gradients_are_there() -> None:
    first, last = (torch.ones(2, requires_grad=True) for _ in range(2))
    seen: list[bool] = []

    def notice(_: torch.Tensor) -> None:
        at_end_of_backward(lambda: seen.append(first.grad is not None and last.grad is not None))

    last.register_post_accumulate_grad_hook(notice)
    (first.sin() * last).sum().backward()
    assert seen == [True]
