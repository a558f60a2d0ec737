"""The mesh of a plan for one device: no neighbours, nothing to send."""

import torch
from torch import Tensor

from meshfold.distributed.rank_mesh import Axes, RankMesh
from meshfold.ir.mesh import Mesh


class SingleMesh(RankMesh):
    """A RankMesh of one rank. Every group is this rank alone, so a collective is a copy."""

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        assert mesh.num_ranks == 1
        super().__init__(mesh, 0, device)

    def start_all_reduce(self, x: Tensor, axes: Axes, reduction: str = "sum") -> Tensor:
        return x.clone()

    def start_all_gather(self, x: Tensor, axes: Axes) -> Tensor:
        return x.clone()

    def start_reduce_scatter(self, x: Tensor, axes: Axes) -> Tensor:
        return x.clone()

    def start_all_to_all(self, x: Tensor, axes: Axes) -> Tensor:
        return x.clone()

    def start_exchange(self, x: Tensor, axes: Axes, sent: list[int], received: list[int]) -> Tensor:
        return x.clone()

    def wait(self, in_flight: Tensor) -> Tensor:
        return in_flight
