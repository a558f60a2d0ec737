"""meshfold: an automatic parallelization compiler for PyTorch model graphs.

Public names are loaded on first use (PEP 562), so that commands which only read a plan never
import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "ClusterSpec": "meshfold.cluster",
    "CompileOptions": "meshfold.options",
    "CompiledModel": "meshfold.runtime",
    "CaptureError": "meshfold.errors",
    "ClusterSpecError": "meshfold.errors",
    "InfeasibleError": "meshfold.errors",
    "MeshfoldError": "meshfold.errors",
    "PassError": "meshfold.errors",
    "PlanFormatError": "meshfold.errors",
    "PlanMismatchError": "meshfold.errors",
    "StageLostError": "meshfold.errors",
    "UnsupportedOpError": "meshfold.errors",
    "Plan": "meshfold.plan",
    "compile": "meshfold.api",
    "find_plan": "meshfold.api",
    "load_checkpoint": "meshfold.checkpoint",
    "save_checkpoint": "meshfold.checkpoint",
    "load_plan": "meshfold.plan_io",
    "save_plan": "meshfold.plan_io",
}
__all__ = [
    "CaptureError",
    "ClusterSpec",
    "ClusterSpecError",
    "CompileOptions",
    "CompiledModel",
    "InfeasibleError",
    "MeshfoldError",
    "PassError",
    "Plan",
    "PlanFormatError",
    "PlanMismatchError",
    "StageLostError",
    "UnsupportedOpError",
    "compile",
    "find_plan",
    "load_checkpoint",
    "load_plan",
    "save_checkpoint",
    "save_plan",
]

if TYPE_CHECKING:
    from meshfold.api import compile, find_plan
    from meshfold.checkpoint import load_checkpoint, save_checkpoint
    from meshfold.cluster import ClusterSpec
    from meshfold.errors import (
        CaptureError,
        ClusterSpecError,
        InfeasibleError,
        MeshfoldError,
        PassError,
        PlanFormatError,
        PlanMismatchError,
        StageLostError,
        UnsupportedOpError,
    )
    from meshfold.options import CompileOptions
    from meshfold.plan import Plan
    from meshfold.plan_io import load_plan, save_plan
    from meshfold.runtime import CompiledModel


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'meshfold' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
