"""Trains a model whose depths share one block, then the same with a block for each depth, from
where the first was (Pseudo-to-Real, arXiv:2110.03888). `meshfold delink` comes in between, as
docs/command_line.md shows:

    python examples/shared_layers.py --save shared
    python examples/shared_layers.py --load released
"""

import argparse
from typing import Any

import torch
from torch import nn

import meshfold

DEPTH, WIDTH, CLASSES = 4, 32, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for depth in range(DEPTH):
            x = self.blocks[depth % len(self.blocks)](x)
        return nn.functional.cross_entropy(self.head(x), labels)


def batch() -> dict[str, torch.Tensor]:
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0))
    return {"x": x, "labels": x[:, :CLASSES].argmax(1)}


def shared() -> tuple[nn.Module, dict[str, Any]]:
    return Model(1), batch()


def released() -> tuple[nn.Module, dict[str, Any]]:
    return Model(DEPTH), batch()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--load", help="go on from this checkpoint, with a block for each depth")
    parser.add_argument("--save", help="write a checkpoint here")
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = meshfold.compile((released if arguments.load else shared)()[0], "local-cpux1", batch())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if arguments.load:
        meshfold.load_checkpoint(arguments.load, model, optimizer)
    for _ in range(arguments.steps):
        loss = model.train_step(batch())
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss:.4f}")
    if arguments.save:
        meshfold.save_checkpoint(arguments.save, model, optimizer)


if __name__ == "__main__":
    main()
