"""The search without microbatches: the decision tree, candidates of a region, the fastest mix on
each mesh, which mesh wins."""
