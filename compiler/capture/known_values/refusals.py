"""Errors for what depends on values of a batch, which nobody knows while a model is traced."""

from typing import Any

from torch.overrides import resolve_name

from meshfold.errors import CaptureError


def function_name(func: Any) -> str:
    """ "torch.Tensor.nonzero" for the function that user code called."""
    return resolve_name(func) or str(getattr(func, "__name__", func))


_CHOICES = frozenset({"nonzero", "where", "unique", "argwhere", "__getitem__", "bincount"})
"""Functions that loops over experts choose rows with."""

_KNOWN_LOOP = (
    "for e, expert in enumerate(self.experts): rows, k = torch.where(ids == e); "
    "y[rows] += weights[rows, k, None] * expert(x[rows])"
)


_REMEDIES = {
    "_pack_padded_sequence": "pass padded sequences to the LSTM or GRU, not packed ones, and leave "
    "padding out of the loss",
    "torch.Tensor.__float__": "write x.item() for a number that is only kept or printed, and an op "
    "on tensors for one that the model computes with; give batch norms a momentum, since with None "
    "they take the number of batches so far",
}
"""What to do instead of a function whose shapes depend on values."""


def refused_branch(name: str, source: str) -> CaptureError:
    """A branch on the value of a tensor."""
    return CaptureError(
        "a Python branch depends on the value of a tensor, which a graph cannot hold; write it "
        "with torch.where, or decide it outside the model (a branch with a side that only raises "
        "is a check, and captured), or name integer inputs that are the same in every batch in "
        "fixed_inputs; a model that initialises itself in its first call is called once before",
        op=name.removeprefix("torch."),
        source=source,
    )


def refused_number(name: str, source: str) -> CaptureError:
    """What gives a number, or a shape, that depends on values."""
    is_choice = name.rpartition(".")[2] in _CHOICES
    experts = f"; of loops over experts this form is known: {_KNOWN_LOOP}" if is_choice else ""
    fixed = ", or name integer inputs that are the same in every batch in fixed_inputs"
    shape = "use an op with a fixed shape (torch.where, a mask)"
    remedy = _REMEDIES.get(name, f"{shape}{fixed}{experts}")
    return CaptureError(
        f"{name} gives a shape or a number that depends on values, which a graph cannot "
        f"hold; {remedy}",
        op=name,
        source=source,
    )
