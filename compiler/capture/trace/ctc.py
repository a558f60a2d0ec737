"""The CTC loss of a traced model, in ops of fixed shape.

ctc_loss(log_probs, targets, ...)       losses of sequences (meshfold.ops.ctc_loss), then
                                        reduced as torch does: "mean" divides each by its length
labels.masked_select(mask)              of a batch of labels [n, s], only for ctc_loss, which
                                        takes all targets in a row: each row, padded at its end
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from meshfold.errors import CaptureError
from meshfold.ops.ctc_loss import ctc_losses

_LOSSES = (F.ctc_loss, torch.ctc_loss)
_REDUCTIONS = ("none", "mean", "sum")
_NAMES = "log_probs targets input_lengths target_lengths blank reduction zero_infinity".split()


class Selected:
    """labels.masked_select(mask) of labels [n, s]. All that is not a CTC loss raises `refused`."""

    def __init__(self, labels: Tensor, mask: Tensor, refused: CaptureError) -> None:
        self.labels = labels
        self.mask = mask
        self.refused = refused

    def padded(self) -> Tensor:
        """[n, s]: what is selected of each row, then zeros."""
        length = self.labels.shape[1]
        place = torch.arange(length, device=self.labels.device)
        order = torch.argsort(torch.where(self.mask, place, place + length), dim=-1)
        return self.labels.masked_fill(~self.mask, 0).gather(-1, order)

    def _refuse(self, *_: Any) -> Any:
        raise self.refused

    __getattr__ = __len__ = __getitem__ = __iter__ = __bool__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __neg__ = _refuse

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        found = [a for a in (*args, *(kwargs or {}).values()) if isinstance(a, cls)]
        raise found[0].refused if found else TypeError(f"{func} of selected labels")


def is_selection(func: Any, args: Sequence[Any]) -> bool:
    """Whether labels [n, s] are selected by a mask of their shape."""
    if func not in (torch.masked_select, torch.Tensor.masked_select) or len(args) != 2:
        return False
    labels, mask = args
    return bool(labels.ndim == 2 and labels.dtype == torch.int64 and mask.shape == labels.shape)


def ctc_loss(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The loss in ops of fixed shape; NotImplemented for another function, for log_probs without a
    batch, and for targets that are all in a row."""
    if func not in _LOSSES:
        return NotImplemented
    given = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    log_probs, targets = given["log_probs"], given["targets"]
    if isinstance(targets, Selected):
        targets = targets.padded()
    if log_probs.ndim != 3 or targets.ndim != 2:
        return NotImplemented
    lengths, target_lengths = (
        torch.as_tensor(given[name], device=log_probs.device)
        for name in ("input_lengths", "target_lengths")
    )
    losses = ctc_losses(
        log_probs,
        targets,
        lengths,
        target_lengths,
        given.get("blank", 0),
        given.get("zero_infinity", False),
    )
    reduction = given.get("reduction", "mean")
    reduction = reduction if isinstance(reduction, str) else _REDUCTIONS[reduction]
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return (losses / target_lengths.clamp(min=1).to(losses.dtype)).mean()
