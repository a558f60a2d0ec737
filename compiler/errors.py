"""The exceptions of meshfold. Each message says what is wrong, where, and what to do next.

MeshfoldError                       base; the CLI prints one line and exits 1
├── CaptureError                    the model cannot be captured (op, source line)
│   └── UnsupportedOpError          an op cannot be run under a plan (names the missing rule)
├── ClusterSpecError(ValueError)    a cluster description is wrong (field path); exit 2
├── OptionError(ValueError)         an option, pin or batch is wrong; exit 2
├── InfeasibleError                 no plan fits (binding constraint, missing bytes)
├── PlanFormatError(ValueError)     a plan file is unreadable or of another version; exit 2
├── PlanMismatchError               plan and model, or plan and processes, do not belong together
├── RanksDifferError                ranks have other programs, weights, calls or batches (which)
├── RankLostError                   other ranks do not come to a collective (step, region, which)
│   └── StageLostError              another stage of a pipeline died or hangs (stage and action)
├── ValueCheckError(ValueError)     an assertion of the model does not hold in a step (line, text)
└── PassError                       a pass of ours failed (pass and op)
"""

from importlib import metadata

TORCH_VERSIONS = "2.11 to 2.14"
"""Those that the tests were run on; pyproject.toml states the same range."""


class MeshfoldError(Exception):
    """Base of every error a user can meet."""

    exit_code = 1


class CaptureError(MeshfoldError):
    """The model cannot be captured.

    `op` names the op or module, `source` is "file:line" where known.
    """

    def __init__(self, message: str, *, op: str = "", source: str = "") -> None:
        where = f" ({source})" if source else ""
        super().__init__(f"{message}{where}")
        self.op = op
        self.source = source


class UnsupportedOpError(CaptureError):
    """An op cannot be run as the plan needs it."""


class ClusterSpecError(MeshfoldError, ValueError):
    """A cluster description is wrong; the message starts with the field path."""

    exit_code = 2


class OptionError(MeshfoldError, ValueError):
    """An option, a pin or a batch size is wrong."""

    exit_code = 2


class InfeasibleError(MeshfoldError):
    """Nothing fits. `required_bytes` and `available_bytes` are per device."""

    def __init__(
        self,
        message: str,
        *,
        binding_constraint: str,
        best_candidate: str = "",
        required_bytes: int = 0,
        available_bytes: int = 0,
    ) -> None:
        super().__init__(message)
        self.binding_constraint = binding_constraint
        self.best_candidate = best_candidate
        self.required_bytes = required_bytes
        self.available_bytes = available_bytes


class PlanFormatError(MeshfoldError, ValueError):
    """A plan file is unreadable, of another version, or breaks the schema (JSON path)."""

    exit_code = 2


class PlanMismatchError(MeshfoldError):
    """The plan was made for another model, cluster or number of processes."""


class RanksDifferError(MeshfoldError):
    """Ranks differ in what must be equal on all of them; raised on all ranks."""


class RankLostError(MeshfoldError):
    """Other ranks died, hang, or failed before a collective that this rank waited for."""


class StageLostError(RankLostError):
    """Another stage of a pipeline did not send what an action waited for."""


class ValueCheckError(MeshfoldError, ValueError):
    """An assertion of the model, run at step time, does not hold for a batch."""


class PassError(MeshfoldError):
    """A pass failed: our bug. Raised `from` the cause; names the pass and, where known, the op."""

    def __init__(self, pass_name: str, op: str, message: str) -> None:
        super().__init__(f"pass {pass_name} failed at {op or 'the graph'}: {message}")


def moved(name: str) -> MeshfoldError:
    """The error for something private to torch that is not where it was."""
    return MeshfoldError(
        f"torch {metadata.version('torch')} moved {name}; use torch {TORCH_VERSIONS}"
    )
