"""Splits a typed program: microbatches of the batch, micro-chunks of a region, graphs of stages."""
