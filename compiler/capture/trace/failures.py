"""What goes wrong while a model is traced, in words for its user."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from meshfold.capture.gradients.inner import OTHER_GRADIENTS, InnerGradients
from meshfold.capture.gradients.route import NextStepError
from meshfold.capture.known_values.refusals import refused_number
from meshfold.errors import CaptureError, OptionError
from meshfold.torch_compat.fake_tensors import lacks_fake
from meshfold.torch_compat.functional_gradients import GRADIENT_IN_VMAP
from meshfold.torch_compat.source_lines import user_line


class RetraceError(Exception):
    """A shortcut of the tracing does not hold: trace without it. The text says why."""


class Watching(Protocol):
    """What has been seen of a trace: the call that failed, the gradients that forward takes."""

    @property
    def failed(self) -> str: ...
    @property
    def gradients(self) -> InnerGradients: ...


@contextmanager
def explain_failure(watch: Watching) -> Iterator[None]:
    """Turn whatever goes wrong while tracing into a CaptureError with op and user line."""
    try:
        yield
    except (CaptureError, OptionError, RetraceError, NextStepError):
        raise
    except Exception as error:
        op = watch.failed or watch.gradients.asked or "the model"
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        source = user_line(reversed([*traceback.walk_tb(error.__traceback__)]))
        if "data-dependent expression" in reason:
            raise refused_number(op, source) from error
        if reason == GRADIENT_IN_VMAP:
            op = "torch.func"
        elif "functorch" in reason:
            op, reason = "torch.func", _IN_A_TRANSFORM
        if lacks_fake(error):
            reason = "it has no fake implementation, which says what it returns without running it"
        repair = _repair(reason, error)
        if op != "torch.func":
            repair = watch.gradients.repair() or repair
        raise CaptureError(
            f"{op} cannot be captured: {reason}; {repair}",
            op=op,
            source=source,
        ) from error


def _repair(reason: str, error: Exception) -> str:
    """What to do next."""
    if "fake implementation" in reason:
        return "register one with torch.library.register_fake"
    if any(_MATCHING in f.f_code.co_names for f, _ in traceback.walk_tb(error.__traceback__)):
        return (
            "a loss that matches predictions with labels (DETR and its kin) runs on the CPU, "
            "outside of torch; capture the model without labels, and compute its loss from what "
            "it returns"
        )
    if "process group has not been initialized" in reason:
        return (
            "the batch is the global one, and a model is shown no process group; build one that "
            "asks when it is built whether there are others before torch.distributed."
            "init_process_group"
        )
    if "higher order operator" in reason:
        return (
            "compute both sides of a torch.cond and choose by torch.where; write while_loop and "
            "scan as Python loops of fixed length"
        )
    if reason == GRADIENT_IN_VMAP:
        return (
            "take that of the sum over samples (torch.func.grad(lambda x: "
            "torch.func.vmap(f)(x).sum())), or write it by formula"
        )
    if reason == _IN_A_TRANSFORM:
        return OTHER_GRADIENTS
    if "'NoneType' object" in reason:
        # As LongT5 and Switch Transformers make their mask of padding.
        return (
            "something is None here that the model may make by itself only where nothing is "
            "traced; pass it in example_inputs (an attention_mask, say), or run the model once "
            "without meshfold to see whether it works at all"
        )
    if _raised_by_model(error):
        return f"see whether the model runs on example_inputs without meshfold; if so, {_REWRITE}"
    return _REWRITE


def _raised_by_model(error: Exception) -> bool:
    """Whether the line that raised is one of the model or its library, as where a size of the
    inputs is not what it takes."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    return package not in ("torch", "meshfold")


_REWRITE = (
    "write it with ops of fixed shape, or keep it out of the model (a loss can be computed from "
    "the logits)"
)
_IN_A_TRANSFORM = "it takes a gradient inside of another transform"
_MATCHING = "linear_sum_assignment"
"""The function of scipy that finds the cheapest matching."""
