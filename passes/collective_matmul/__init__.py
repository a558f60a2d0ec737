"""Collective matmul (async tensor parallelism): products that overlap with the gather of their
rows, or with the reduce-scatter of their sums, shard by shard.

Simulated gain: Llama-3-8B on 64 H100s with tp8+sp takes 312 ms a step in eager mode instead of 330.
Numbers hold on gloo; the fused kernels of CUDA have not run.

The pin `collective_matmul=0` takes it out; plans without it have no such op. Its other layers are
one file each: meshfold.passes.rules.ops.collective_matmul types the ops,
meshfold.ops.collective_matmul runs them, meshfold.refine.collective_matmul chooses the products.
"""

from meshfold.passes.collective_matmul.rewrite import (
    MatmulGroup,
    matmul_groups,
    with_collective_matmuls,
    with_planned_matmuls,
)

__all__ = [
    "MatmulGroup",
    "matmul_groups",
    "with_collective_matmuls",
    "with_planned_matmuls",
]
