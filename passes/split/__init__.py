"""Cuts batch or sequence: microbatches, micro-chunks, rings of shards, graphs of stages."""
