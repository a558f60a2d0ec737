"""The search without microbatches: the decision tree, candidates of a region, the fastest mix on
each mesh, bounds, and which mesh wins."""
