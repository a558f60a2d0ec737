"""Tensors of samples: values that keep apart what an op may not confuse."""

import torch
from torch import Tensor


def real(*shape: int, grad: bool = True, seed: int = 7) -> Tensor:
    """Values in (0.1, 0.9): inside the domain of every function here, no ties, no kinks. Tensors of
    one shape and one seed are equal: two operands that an op may not confuse have two seeds."""
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    x = torch.rand(shape, generator=generator, dtype=torch.float64)
    return (0.1 + 0.8 * x).requires_grad_(grad)


def whole(high: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + 3)
    return torch.randint(0, high, shape, generator=generator)


def places(high: int, rows: int, columns: int, width: int) -> Tensor:
    """[rows, columns, width] of places below `high`, no place twice in a column: what is written
    twice is whichever write came last."""
    generator = torch.Generator().manual_seed(high + columns)
    return (
        torch.stack(
            [torch.randperm(high, generator=generator)[:columns] for _ in range(rows * width)]
        )
        .reshape(rows, width, columns)
        .transpose(1, 2)
        .contiguous()
    )


def permuted(size: int) -> Tensor:
    """Every index of a dim, once."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(size))


def flags(*shape: int) -> Tensor:
    return whole(2, *shape).bool()


def few(*shape: int) -> Tensor:
    """Flags of which a tenth is set: any and all of them differ from place to place."""
    return real(*shape, grad=False) < 0.18


def one(*shape: int) -> Tensor:
    """One flag."""
    found = torch.zeros(shape, dtype=torch.bool)
    found[(0,) * len(shape)] = True
    return found


def steps(*shape: int) -> Tensor:
    """Values in (-2, 2), on both sides of whole numbers."""
    return (5 * real(*shape).detach() - 2.5).requires_grad_()


def special(*shape: int) -> Tensor:
    """Some values infinite, some no numbers."""
    x = real(*shape).detach()
    x[x > 0.8] = float("nan")
    x[x < 0.2] = float("inf")
    return x.requires_grad_()


def halves(*shape: int) -> Tensor:
    """0, 0.5 and 1: some entries of two of these are equal."""
    return ((2 * real(*shape).detach()).round() / 2).requires_grad_()


def targets(rows: int, classes: int) -> Tensor:
    """Class numbers, unevenly ignored."""
    target = whole(classes, rows)
    target[: rows // 3] = -100
    return target
