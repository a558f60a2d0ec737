"""Buffers of one number that forward decides by: "have I been initialised?" (ActNorm, codebooks of
vector quantizers, observers).

A graph has one side of such a branch. So where a model is refused otherwise, its buffers of one
number are constants of the program, with the values that they have when the model is captured; a
step in which one has another value is refused. A buffer that forward changes is none: a constant
that is written to is refused by the trace.
"""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

_MOST_SHOWN = 4


def choices_of_buffers(model: nn.Module) -> list[dict[str, Tensor]]:
    """Buffers to fix, by name, in the order to try: flags and whole numbers; all of one number."""
    every = _buffers_of_one_number(model)
    whole = {name: value for name, value in every.items() if not value.is_floating_point()}
    return [found for found in (whole, every if len(every) > len(whole) else {}) if found]


def _buffers_of_one_number(model: nn.Module) -> dict[str, Tensor]:
    """Copies of those of `model` that have values, by every name of theirs, but for the counters of
    batch norms."""
    counters = {
        id(m.num_batches_tracked)
        for m in model.modules()
        if isinstance(m, _NormBase) and m.track_running_stats
    }
    return {
        name: buffer.detach().cpu().clone()
        for name, buffer in model.named_buffers(remove_duplicate=False)
        if buffer.numel() == 1 and not buffer.is_meta and id(buffer) not in counters
    }


def fix_buffers(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Makes them constants of a fake copy, in the dtypes that it has them in. One module may have
    several names."""
    for name, value in values.items():
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        if (buffer := owner._buffers.pop(leaf, None)) is not None:
            owner.__dict__[leaf] = value.to(buffer.dtype, copy=True)


def fixed_buffers_note(values: Mapping[str, Tensor]) -> str:
    """The assumption, for the notes of a plan; "" without any."""
    if not values:
        return ""
    shown = [f"{name} = {value.item():g}" for name, value in [*values.items()][:_MOST_SHOWN]]
    more = f" and {len(values) - _MOST_SHOWN} more" if len(values) > _MOST_SHOWN else ""
    return (
        f"forward decides by buffers, which are taken for constants: {', '.join(shown)}{more}; a "
        "step in which one has another value is refused"
    )
