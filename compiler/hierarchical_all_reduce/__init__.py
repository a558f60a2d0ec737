"""Hierarchical all-reduces of gradients: in three steps, by the nodes that a group lies on.

    reduce-scatter   among the ranks of a node       every rank has a shard of the node's sum
    all-reduce       among those that have the same shard, one per node
    all-gather       among the ranks of a node

With k ranks on each of m nodes only 1 / k of the bytes crosses the network per rank, (m - 1) / m of
it each way, while a ring over all sends (n - 1) / n of everything through every node (Jia et al.,
"Highly Scalable Deep Learning Training System with Mixed-Precision", 2018). The steps load
different links, so all-reduces run in pieces, all of which go from step to step, and of
reductions that follow each other the next is in its first step while this one is in its second
(`Interleaver`).

Simulated gain: GPT-2 on 16 A10Gs of two nodes takes 120 ms a step instead of 142. Seldom on DGX
nodes, where NCCL's own algorithms do as well.

The pin `hierarchical_all_reduce=0` takes it out. Here is what all layers share; each has one file:
meshfold.passes.events.hierarchical prices and chooses,
meshfold.cost_models.simulation.hierarchical_all_reduce simulates, and
meshfold.zero.hierarchical_all_reduce runs them.
"""

from meshfold.hierarchical_all_reduce.choice import HierarchicalAllReduce, HierarchicalSplit
from meshfold.hierarchical_all_reduce.interleaving import Interleaver

__all__ = ["HierarchicalAllReduce", "HierarchicalSplit", "Interleaver"]
