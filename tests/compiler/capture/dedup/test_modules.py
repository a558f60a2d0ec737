"""Which children of a model may be equal."""

from torch import nn

from meshfold.capture.dedup.modules import find_children


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 4))


def skeletons(model: nn.Module) -> list[int]:
    return [child.skeleton for child in find_children(model)]


def test_children_of_one_build_are_equal() -> None:
    layers = nn.ModuleList(Block() for _ in range(3))
    assert skeletons(layers) == [0, 0, 0]
    assert [child.scope for child in find_children(nn.ModuleDict({"all": layers}))][1:] == [
        "all.0",
        "all.1",
        "all.2",
    ]
    layers.append(Block(8))
    assert skeletons(layers) == [0, 0, 0, 1]


def test_ties_modes_and_hooks_make_a_difference() -> None:
    layers = nn.ModuleList(Block() for _ in range(5))
    layers[1].parts[0].weight = layers[0].parts[2].weight
    layers[2].eval()
    layers[3].parts[1].register_forward_hook(lambda module, args, out: out)
    assert skeletons(layers) == [0, 1, 2, 3, 4]


def test_small_children_are_none() -> None:
    assert find_children(nn.ModuleList(nn.Linear(4, 4) for _ in range(3))) == []
