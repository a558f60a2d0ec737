"""What masks select of tensors, in ops of fixed shape; and CTC losses, which take such targets.

ctc_loss(log_probs, targets, ...)       losses of sequences (meshfold.ops.ctc_loss), then
                                        reduced as torch does: "mean" divides each by its length
labels.masked_select(mask)              of a batch of labels [n, s], only for ctc_loss, which
                                        takes all targets in a row: each row, padded at its end
hidden[mask].view(n, -1, d)[:, -1]      of hidden [n, s, d]: the last place of each row that the
                                        mask has, as BART and T5 classify by the last <eos>; after
                                        unique_consecutive(mask.sum(1)).numel() == 1, a check that
                                        rows have equally many
hidden[mask] = hidden[mask] + rows      of hidden [n, s, d] and a mask [n, s]: rows go where the
                                        mask is, in order (Qwen3-VL's deepstack)
"""

from collections.abc import Callable, Mapping, Sequence
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
    """What has a shape that depends on values. What a subclass does not know raises `refused`."""

    def __init__(self, refused: CaptureError) -> None:
        self.refused = refused

    def _refuse(self, *_: Any) -> Any:
        raise self.refused

    __getattr__ = __len__ = __getitem__ = __iter__ = __bool__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __neg__ = _refuse

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        found = [a for a in (*args, *(kwargs or {}).values()) if isinstance(a, Selected)]
        raise found[0].refused if found else TypeError(f"{func} of what a mask selects")


class _Labels(Selected):
    """labels.masked_select(mask) of labels [n, s]."""

    def __init__(self, labels: Tensor, mask: Tensor, refused: CaptureError) -> None:
        super().__init__(refused)
        self.labels, self.mask = labels, mask

    def padded(self) -> Tensor:
        """[n, s]: what is selected of each row, then zeros."""
        length = self.labels.shape[1]
        place = torch.arange(length, device=self.labels.device)
        order = torch.argsort(torch.where(self.mask, place, place + length), dim=-1)
        return self.labels.masked_fill(~self.mask, 0).gather(-1, order)


class _Runs(Selected):
    """unique_consecutive(counts) of counts [n]. number: makes a number of a tensor."""

    def __init__(
        self, counts: Tensor, number: Callable[[Tensor], Any], refused: CaptureError
    ) -> None:
        super().__init__(refused)
        self.counts, self.number = counts, number

    def numel(self) -> Any:
        return self.number((self.counts[1:] != self.counts[:-1]).sum() + 1)


class _Rows(Selected):
    """hidden[mask] of hidden [n, s, d] and a mask [n, s] with equally many places in each row.
    number: makes a number of a tensor."""

    def __init__(
        self, hidden: Tensor, mask: Tensor, number: Callable[[Tensor], Any], refused: CaptureError
    ) -> None:
        super().__init__(refused)
        self.hidden, self.mask, self.number = hidden, mask, number

    @property
    def shape(self) -> tuple[Any, int]:
        return self.number(self.mask.sum()), self.hidden.shape[-1]

    def view(self, *shape: int) -> "_OfEachRow":
        num_rows, _, width = self.hidden.shape
        if shape != (num_rows, -1, width):
            raise self.refused
        return _OfEachRow(self.hidden, self.mask, self.refused)


class _OfEachRow(Selected):
    """_Rows as [n, equally many, d], of which the last is taken."""

    def __init__(self, hidden: Tensor, mask: Tensor, refused: CaptureError) -> None:
        super().__init__(refused)
        self.hidden, self.mask = hidden, mask

    def __getitem__(self, index: Any) -> Tensor:
        if not isinstance(index, tuple) or index[:2] != (slice(None), -1):
            raise self.refused
        if index[2:] not in ((), (slice(None),)):
            raise self.refused
        num_rows, length = self.mask.shape
        place = torch.arange(length, device=self.mask.device)
        last = (place * self.mask).argmax(-1)
        return self.hidden[torch.arange(num_rows, device=self.mask.device), last]


class _Places(Selected):
    """hidden[mask] of hidden [n, s, d] and a mask [n, s], to which rows are added."""

    def __init__(self, hidden: Tensor, mask: Tensor, refused: CaptureError) -> None:
        super().__init__(refused)
        self.hidden, self.mask = hidden, mask

    def __add__(self, rows: Any) -> "_Sums":
        if not isinstance(rows, Tensor) or rows.shape[1:] != self.hidden.shape[2:]:
            raise self.refused
        places = self.mask.unsqueeze(-1).expand_as(self.hidden)
        sums = self.hidden + torch.zeros_like(self.hidden).masked_scatter(places, rows)
        return _Sums(sums, self.mask, self.refused)


class _Sums(Selected):
    """_Places with rows added, to be written where they were taken."""

    def __init__(self, sums: Tensor, mask: Tensor, refused: CaptureError) -> None:
        super().__init__(refused)
        self.sums, self.mask = sums, mask

    def write(self, hidden: Tensor, mask: Any) -> None:
        if mask is not self.mask or hidden.shape != self.sums.shape:
            raise self.refused
        hidden.copy_(torch.where(mask.unsqueeze(-1), self.sums, hidden))


class Selections:
    """What masks select in one call of a model. number: makes a number of a tensor, of which
    assertions can ask; refused: the error for a function whose result has no fixed shape."""

    def __init__(
        self, number: Callable[[Tensor], Any], refused: Callable[[Any], CaptureError]
    ) -> None:
        self.number, self.refused = number, refused
        self.counts: list[tuple[Tensor, Tensor]] = []
        """Sums of masks over their rows, and the masks."""
        self.even: list[Tensor] = []
        """Masks that are checked to have equally many places in each row."""

    def see(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Note the counts of a mask."""
        if func in (torch.sum, torch.Tensor.sum) and args and isinstance(args[0], Tensor):
            mask, *dims = (*args, *kwargs.values())
            if mask.dtype == torch.bool and mask.ndim == 2 and dims in ([1], [-1]):
                self.counts.append((result, mask))

    def answer(self, func: Any, args: Sequence[Any]) -> Any:
        """What stands for a selection; NotImplemented for another function."""
        if func in (torch.unique_consecutive, torch.Tensor.unique_consecutive):
            masks = [mask for counts, mask in self.counts if counts is args[0]]
            self.even += masks
            return _Runs(args[0], self.number, self.refused(func)) if masks else NotImplemented
        if func is torch.Tensor.__getitem__:
            hidden, mask = args[0], _mask_of(args[1])
            if hidden.ndim == 3 and any(mask is known for known in self.even):
                return _Rows(hidden, mask, self.number, self.refused(func))
            if isinstance(mask, Tensor) and mask.dtype == torch.bool:
                if hidden.ndim == 3 and mask.shape == hidden.shape[:2]:
                    return _Places(hidden, mask, self.refused(func))
        if func is torch.Tensor.__setitem__ and isinstance(args[2], _Sums):
            args[2].write(args[0], _mask_of(args[1]))
            return None
        if _is_selection(func, args):
            return _Labels(args[0], args[1], self.refused(func))
        return NotImplemented


def _mask_of(index: Any) -> Any:
    """The mask of an index [mask] or [mask, :]."""
    if isinstance(index, tuple) and index[1:] == (slice(None),):
        return index[0]
    return index


def _is_selection(func: Any, args: Sequence[Any]) -> bool:
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
    if isinstance(targets, _Labels):
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
