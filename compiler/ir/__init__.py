"""Frozen data that every phase reads: cluster, mesh, SPMD types, op graph, strategy, plan, step
events."""
