"""The reductions of gradients of one step that may take several steps: all-reduces, some of them
hierarchical (meshfold.ir.node_groups), and those of HSDP, which are scattered among the ranks that
share states and summed over the replicas."""

from collections.abc import Generator

import torch
import torch.nn.functional as F
from torch import Tensor

from meshfold.distributed.rank_mesh import Axes, RankMesh
from meshfold.hierarchical_all_reduce import HierarchicalAllReduce, HierarchicalSplit, Interleaver
from meshfold.ir.node_groups import ACROSS_NODES, IN_NODE

Steps = Generator[None, None, Tensor]
Started = tuple[Tensor | None, Steps | None]
"""An all-reduce in flight: its tensor, or its steps where it is hierarchical."""


class AllReduces:
    """The all-reduces of one step. hierarchical: which run so; None for none."""

    def __init__(self, mesh: RankMesh, hierarchical: HierarchicalAllReduce | None = None) -> None:
        self._mesh = mesh
        self._hierarchical = hierarchical
        self._interleaver: Interleaver[Tensor] = Interleaver()

    def start(self, flat: Tensor, axes: Axes) -> Started:
        """The sum over the group of flat [n], which is given up."""
        split = None
        if self._hierarchical is not None:
            split = self._hierarchical.split(axes, flat.numel() * flat.element_size())
        if split is None:
            return self._mesh.start_all_reduce_in_place(flat, axes), None
        steps = _in_steps(self._mesh, flat, axes, split)
        del flat
        self._interleaver.begin(steps)
        return None, steps

    def start_scattered(self, flat: Tensor, axes: Axes, replicas: Axes) -> Started:
        """Of flat [n * num_shards] the sum over axes and replicas, of which rank i of axes gets
        shard i [n]."""
        steps = _scattered(self._mesh, flat, axes, replicas)
        del flat
        self._interleaver.begin(steps, 2)
        return None, steps

    def finish(self, started: Started) -> Tensor:
        """The sum, or the shard of it. Once for each."""
        in_flight, steps = started
        if steps is not None:
            return self._interleaver.finish(steps)
        assert in_flight is not None
        return self._mesh.wait(in_flight)


def _scattered(mesh: RankMesh, flat: Tensor, axes: Axes, replicas: Axes) -> Steps:
    scattered = mesh.start_reduce_scatter(flat, axes)
    del flat
    yield
    summed = mesh.start_all_reduce_in_place(mesh.wait(scattered), replicas)
    del scattered
    yield
    return mesh.wait(summed)


def _in_steps(mesh: RankMesh, flat: Tensor, axes: Axes, split: HierarchicalSplit) -> Steps:
    """What does not divide into pieces and ranks is padded, by a copy; most sizes do divide."""
    numel = flat.numel()
    padding = -numel % (split.pieces * split.ranks)
    if padding:
        flat = F.pad(flat, (0, padding))
    in_node, across = (*axes, IN_NODE), (*axes, ACROSS_NODES)
    flying = [mesh.start_reduce_scatter(piece, in_node) for piece in flat.chunk(split.pieces)]
    del flat
    yield
    flying = [mesh.start_all_reduce_in_place(mesh.wait(piece), across) for piece in flying]
    yield
    flying = [mesh.start_all_gather(mesh.wait(piece), in_node) for piece in flying]
    yield
    sums = [mesh.wait(piece) for piece in flying]
    return (sums[0] if len(sums) == 1 else torch.cat(sums))[:numel]
