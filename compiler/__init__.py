"""meshfold: an automatic parallelization compiler for PyTorch model graphs.

Public names are loaded on first use (PEP 562), so that commands which only read a plan never
import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from meshfold._version import __version__ as __version__

_EXPORTS = {
    "ClusterSpec": "meshfold.ir.cluster",
    "CompileOptions": "meshfold.ir.options",
    "CompiledModel": "meshfold.training.compiled_model",
    "CaptureError": "meshfold.errors",
    "ClusterSpecError": "meshfold.errors",
    "InfeasibleError": "meshfold.errors",
    "MeshfoldError": "meshfold.errors",
    "PassError": "meshfold.errors",
    "PlanFormatError": "meshfold.errors",
    "PlanMismatchError": "meshfold.errors",
    "RanksDifferError": "meshfold.errors",
    "RankLostError": "meshfold.errors",
    "StageLostError": "meshfold.errors",
    "UnsupportedOpError": "meshfold.errors",
    "LateUpdates": "meshfold.offload.late_updates",
    "LowPrecisionStates": "meshfold.low_precision.states",
    "Plan": "meshfold.ir.plan",
    "compile": "meshfold.api",
    "delink": "meshfold.training.saving.delink",
    "find_plan": "meshfold.api",
    "keep_states_on_disk": "meshfold.offload.state_files",
    "load_checkpoint": "meshfold.training.saving.checkpoint",
    "save_checkpoint": "meshfold.training.saving.checkpoint",
    "load_plan": "meshfold.plan_file.io",
    "register_rule": "meshfold.capture.custom_ops.register",
    "save_plan": "meshfold.plan_file.io",
}
__all__ = [
    "CaptureError",
    "ClusterSpec",
    "ClusterSpecError",
    "CompileOptions",
    "CompiledModel",
    "InfeasibleError",
    "LateUpdates",
    "LowPrecisionStates",
    "MeshfoldError",
    "PassError",
    "Plan",
    "PlanFormatError",
    "PlanMismatchError",
    "RanksDifferError",
    "RankLostError",
    "StageLostError",
    "UnsupportedOpError",
    "compile",
    "delink",
    "find_plan",
    "keep_states_on_disk",
    "load_checkpoint",
    "load_plan",
    "register_rule",
    "save_checkpoint",
    "save_plan",
]

if TYPE_CHECKING:
    from meshfold.api import compile, find_plan
    from meshfold.capture.custom_ops.register import register_rule
    from meshfold.errors import (
        CaptureError,
        ClusterSpecError,
        InfeasibleError,
        MeshfoldError,
        PassError,
        PlanFormatError,
        PlanMismatchError,
        RankLostError,
        RanksDifferError,
        StageLostError,
        UnsupportedOpError,
    )
    from meshfold.ir.cluster import ClusterSpec
    from meshfold.ir.options import CompileOptions
    from meshfold.ir.plan import Plan
    from meshfold.low_precision.states import LowPrecisionStates
    from meshfold.offload.late_updates import LateUpdates
    from meshfold.offload.state_files import keep_states_on_disk
    from meshfold.plan_file.io import load_plan, save_plan
    from meshfold.training.compiled_model import CompiledModel
    from meshfold.training.saving.checkpoint import load_checkpoint, save_checkpoint
    from meshfold.training.saving.delink import delink


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'meshfold' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
