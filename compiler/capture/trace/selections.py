"""What masks select of tensors, in ops of fixed shape; and CTC losses, which take such targets.

logits[mask], x.masked_select(mask)     all rows, and which of them count
logits[mask.nonzero()]                  (meshfold.capture.masked_rows)
hidden[mask] = hidden[mask] + rows      of hidden [n, s, d] and a mask [n, s]: rows go where the
                                        mask is, in order (Qwen3-VL's deepstack)
hidden[mask].view(n, -1, d)[:, -1]      of hidden [n, s, d]: the last place of each row that the
                                        mask has, as BART and T5 classify by the last <eos>; after
                                        unique_consecutive(mask.sum(1)).numel() == 1, a check that
                                        rows have equally many
ctc_loss(log_probs, targets, ...)       losses of sequences (meshfold.ops.ctc_loss), then
                                        reduced as torch does: "mean" divides each by its length;
                                        of targets [n, s], or of labels.masked_select(mask)
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from meshfold.capture.masked_rows.equal_masks import EqualMasks
from meshfold.capture.masked_rows.places import Places, joined, places_of, taken_by
from meshfold.capture.masked_rows.rows import Mask, MaskedRows, is_mask_of, rows_of
from meshfold.capture.masked_rows.stand_in import Selected
from meshfold.errors import CaptureError
from meshfold.ops.ctc_loss import ctc_losses

_LOSSES = (F.ctc_loss, torch.ctc_loss)
_REDUCTIONS = ("none", "mean", "sum")
_NAMES = "log_probs targets input_lengths target_lengths blank reduction zero_infinity".split()


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


class Selections:
    """What masks select in one call of a model. number: makes a number of a tensor, of which
    assertions can ask; assume: keeps a check, which every step runs; refused: the error for a
    function whose result has no fixed shape."""

    def __init__(
        self,
        number: Callable[[Tensor], Any],
        assume: Callable[[Tensor, str], None],
        refused: Callable[[Any], CaptureError],
    ) -> None:
        self.number, self.assume, self.refused = number, assume, refused
        self.masks = EqualMasks()
        self.sources: list[str] = []
        """Lines that select rows."""
        self.num_filled = 0
        """Selections of floats so far, each of which replaces values by others."""
        self.counts: list[tuple[Tensor, Tensor]] = []
        """Sums of masks over their rows, and the masks."""
        self.even: list[Tensor] = []
        """Masks that are checked to have equally many places in each row."""

    def notes(self) -> tuple[str, ...]:
        """What the plan says of rows that are computed though no mask has them."""
        lines = dict.fromkeys(self.sources)
        return tuple(f"all rows are computed where a mask selects some ({line})" for line in lines)

    def see(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Note the counts of a mask, and how masks are made."""
        self.masks.see(func, args, kwargs, result)
        if func in (torch.sum, torch.Tensor.sum) and args and isinstance(args[0], Tensor):
            mask, *dims = (*args, *kwargs.values())
            if mask.dtype == torch.bool and mask.ndim == 2 and dims in ([1], [-1]):
                self.counts.append((result, mask))

    def answer(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What stands for a selection; NotImplemented for another function."""
        if func in _LOSSES:
            return NotImplemented
        if func is torch.Tensor.__setitem__ and isinstance(args[2], MaskedRows):
            self._write(args[0], _mask_of(args[1]), args[2])
            return None
        if any(isinstance(a, MaskedRows) for a in (*args, *kwargs.values())):
            # Here: another mode would see the body of a function of torch.nn.functional instead.
            return MaskedRows.__torch_function__(func, (), args, kwargs)
        if (places := taken_by(func, args, kwargs)) is not None:
            return self._rows(func, args[0], places.chosen())
        if func in (torch.unique_consecutive, torch.Tensor.unique_consecutive):
            masks = [mask for counts, mask in self.counts if counts is args[0]]
            self.even += masks
            return _Runs(args[0], self.number, self.refused(func)) if masks else NotImplemented
        if func is torch.Tensor.__getitem__ and isinstance(args[0], Tensor):
            hidden, mask = args[0], _mask_of(args[1])
            if hidden.ndim == 3 and any(mask is known for known in self.even):
                return _Rows(hidden, mask, self.number, self.refused(func))
            if is_mask_of(mask, hidden):
                return self._rows(func, hidden, mask)
            if isinstance(mask, tuple) and mask and is_mask_of(mask[0], hidden):
                return self._rows(func, hidden, mask[0]).indexed((slice(None), *mask[1:]))
        if func in _SELECTS and len(args) == 2 and args[0].shape == args[1].shape:
            return self._rows(func, *args)
        return places_of(func, args, kwargs, self.assume, self.refused)

    def _rows(self, func: Any, hidden: Tensor, mask: Tensor) -> MaskedRows:
        """hidden[mask]."""
        refused = self.refused(func)
        if hidden.is_complex():
            raise refused
        self.sources.append(refused.source)
        self.num_filled += hidden.is_floating_point()
        known = Mask(mask, mask._version, self.assume, self.masks.are_equal, self.number)
        return rows_of(hidden, known, self.num_filled, refused)

    def _write(self, hidden: Tensor, mask: Any, rows: MaskedRows) -> None:
        """hidden[mask] = rows."""
        mask = joined(mask)
        mask = mask.chosen() if isinstance(mask, Places) else mask
        if not is_mask_of(mask, hidden) or not self.masks.are_equal(mask, rows.chosen()):
            raise rows.refused
        if hidden.shape != rows.values.shape:
            raise rows.refused
        hidden.copy_(rows.kept(hidden))


_SELECTS = (torch.masked_select, torch.Tensor.masked_select)


def _mask_of(index: Any) -> Any:
    """The mask of an index [mask] or [mask, :]."""
    if isinstance(index, tuple) and index[1:] == (slice(None),):
        return index[0]
    return index


def ctc_loss(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The loss in ops of fixed shape; NotImplemented for another function, for log_probs without a
    batch, and for targets that are all in a row."""
    if func not in _LOSSES:
        return NotImplemented
    given = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    log_probs, targets = given["log_probs"], given["targets"]
    if isinstance(targets, MaskedRows):
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
