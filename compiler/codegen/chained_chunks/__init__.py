"""Chained chunks: micro-chunks that cross the boundaries of layers (software pipelining).

A layer sends every chunk on as soon as it is computed, and the next layer begins with it while the
last collectives of the one before are in flight; nobody joins the chunks in between. Layers with
full recomputation join theirs.

Simulated gain over chunks that end with their layer: Llama-3-8B on 64 H100s takes 253 ms a step
instead of 275 with tp8+sp, 356 instead of 372 with tp8. Not measured on GPUs.

The pin `chained_chunks=0` takes it out; so does `micro_chunks=1`, without which nothing is chunked.
Its search is meshfold.passes.chained_chunks; meshfold.runtime.chained_execution runs it, and
meshfold.cost_models.simulation.chained_run simulates it.
"""

from meshfold.codegen.chained_chunks.program import chunked_regions, with_chained_chunks

__all__ = ["chunked_regions", "with_chained_chunks"]
