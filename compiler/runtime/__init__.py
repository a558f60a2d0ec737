"""Runs an emitted program, in one pass or as a pipeline: batches in, regions in their mode,
recomputation, messages of stages."""
