"""Letting ranks read each other's memory, for products in a ring
(meshfold.torch_compat.symmetric_memory)."""

from meshfold.codegen.emit.pipeline import EmittedPipeline
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.distributed.rank_mesh import ProcessMesh, RankMesh
from meshfold.errors import OptionError
from meshfold.passes.rules.ops.collective_matmul import COLLECTIVE_MATMUL_RULES, RING


def share_memory(program: EmittedProgram | EmittedPipeline, mesh: RankMesh | None) -> None:
    """Products of `program` in a ring become torch's fused operators. Called on all ranks.

    Raises OptionError where that cannot be: no job, no CUDA devices, no product in a ring.
    """
    if not isinstance(mesh, ProcessMesh):
        raise OptionError("symmetric memory is for a model that runs; compile it in its job")
    axes = ring_axes(program) if isinstance(program, EmittedProgram) else ()
    if not axes:
        raise OptionError("symmetric memory is for products in a ring, and the plan has none")
    if mesh.device.type != "cuda":
        raise OptionError(f"symmetric memory takes CUDA devices, and this rank has {mesh.device}")
    mesh.share_memory(axes)


def ring_axes(program: EmittedProgram) -> tuple[str, ...]:
    """Mesh axes on which products are in a ring, in mesh order."""
    rings = {
        axis
        for region in program.regions
        for op, typing in zip(region.ops.ops, region.typing.ops, strict=True)
        if op.target in COLLECTIVE_MATMUL_RULES
        for axis, name in zip(program.mesh.names, typing.rules, strict=True)
        if name.partition("/")[0] == RING
    }
    return tuple(axis for axis in program.mesh.names if axis in rings)
