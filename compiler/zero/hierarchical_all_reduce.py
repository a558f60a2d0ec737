"""The all-reduces of gradients of one step: whole, or in phases (meshfold.ir.node_groups)."""

from collections.abc import Generator

import torch
import torch.nn.functional as F
from torch import Tensor

from meshfold.distributed.rank_mesh import Axes, RankMesh
from meshfold.ir.node_groups import ACROSS_NODES, IN_NODE, Cut, Hierarchy, Turns

Phases = Generator[None, None, Tensor]
Started = tuple[Tensor | None, Phases | None]
"""What is in flight: a tensor, or phases."""


class AllReduces:
    """hierarchy: which run in phases; None for none."""

    def __init__(self, mesh: RankMesh, hierarchy: Hierarchy | None = None) -> None:
        self._mesh = mesh
        self._hierarchy = hierarchy
        self._turns: Turns[Tensor] = Turns()

    def start(self, flat: Tensor, axes: Axes) -> Started:
        """The sum over the group of flat [n], which is given up."""
        cut = None
        if self._hierarchy is not None:
            cut = self._hierarchy.cut(axes, flat.numel() * flat.element_size())
        if cut is None:
            return self._mesh.start_all_reduce_in_place(flat, axes), None
        phases = _in_phases(self._mesh, flat, axes, cut)
        del flat
        self._turns.begin(phases)
        return None, phases

    def finish(self, started: Started) -> Tensor:
        """The sum [n]. Once for each."""
        in_flight, phases = started
        if phases is not None:
            return self._turns.finish(phases)
        assert in_flight is not None
        return self._mesh.wait(in_flight)


def _in_phases(mesh: RankMesh, flat: Tensor, axes: Axes, cut: Cut) -> Phases:
    """What does not divide into pieces and ranks is padded, by a copy; most sizes do divide."""
    numel = flat.numel()
    padding = -numel % (cut.pieces * cut.ranks)
    if padding:
        flat = F.pad(flat, (0, padding))
    in_node, across = (*axes, IN_NODE), (*axes, ACROSS_NODES)
    flying = [mesh.start_reduce_scatter(piece, in_node) for piece in flat.chunk(cut.pieces)]
    del flat
    yield
    flying = [mesh.start_all_reduce_in_place(mesh.wait(part), across) for part in flying]
    yield
    flying = [mesh.start_all_gather(mesh.wait(part), in_node) for part in flying]
    yield
    sums = [mesh.wait(piece) for piece in flying]
    return (sums[0] if len(sums) == 1 else torch.cat(sums))[:numel]
