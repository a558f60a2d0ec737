"""Conversions of layout, run at once."""

from typing import Any

from torch import Tensor

from meshfold.distributed.rank_mesh import RankMesh
from meshfold.distributed.step_context import StepContext
from meshfold.ir.conversion_step import Step
from meshfold.ir.op_graph import Value
from meshfold.ops.conversions import step_calls


def apply_step(mesh: RankMesh, x: Tensor, step: Step, value: Value) -> Tensor:
    """Runs `step` on the local tensor x."""
    result: Any = x
    for call in step_calls(step, mesh.mesh, value):
        result = call.function(StepContext(mesh), result, call.axis, *call.args)
    return result  # type: ignore[no-any-return]
