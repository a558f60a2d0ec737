"""Frozen data that every phase reads, and its arithmetic: cluster, mesh, SPMD types, op graph,
options, strategy, plan, step events."""
