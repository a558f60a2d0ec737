"""What a call of the model writes to: its state.

Buffers are state, and so are frozen parameters that forward moves, as MoCo and BYOL move the
encoder of their targets. These are read and written as buffers are: `model_names` is told which
they are, and the model is traced again.
"""

from collections.abc import Collection, Iterable

import torch
from torch import fx
from torch.export.graph_signature import OutputKind, OutputSpec

from meshfold.errors import CaptureError
from meshfold.ir.op_graph import ParameterInfo, Source, SourceKind

STATE_WRITES = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION)


class WrittenParametersError(Exception):
    """names: the frozen parameters that forward writes, and `model_names` did not know of."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(", ".join(sorted(names)))
        self.names = frozenset(names)


def is_clamped(spec: OutputSpec, value: fx.Node) -> bool:
    """Whether an input is written to with its own values between bounds, as some losses of spans do
    with positions. A step leaves it as it is: the next call, with the same input or the clamped
    one, computes the same."""
    if (
        spec.kind is not OutputKind.USER_INPUT_MUTATION
        or value.target is not torch.ops.aten.clamp.default
    ):
        return False
    written, *bounds = value.args
    return (
        isinstance(written, fx.Node)
        and written.name == spec.target
        and all(bound is None or isinstance(bound, int | float) for bound in bounds)
    )


def is_state(written: Source) -> bool:
    """Whether a step may change what a call writes to."""
    return written.kind is SourceKind.BUFFER


def expect_writes(written: Iterable[Source], parameters: Iterable[ParameterInfo]) -> None:
    """Raises WrittenParametersError where frozen ones of `parameters`, which would stay as they
    are, are written."""
    frozen = {p.name for p in parameters if not p.requires_grad}
    if found := frozen.intersection(source.name for source in written):
        raise WrittenParametersError(found)


def refuse_write(written: str, source: str) -> None:
    """Refuses a write to what a step cannot change."""
    raise CaptureError(
        f"the model writes to {written}; only buffers and frozen parameters may change in a step: "
        "write it out of place (x = x.clamp(...), not x.clamp_(...))",
        op=written,
        source=source,
    )
