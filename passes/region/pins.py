"""Parameters whose stored layout the user fixed: `--pin layout:NAME=VALUE`.

    replicate   one copy on every rank
    tp:DIM      a shard of DIM on tp; dp is left to the search
    tp:DIM+     the same, padded: whole heads of a number that does not divide
    dp          a shard on dp, as ZeRO-3 stores it; tp is left to the search
    tp:DIM,dp   both

NAME may be a pattern (`model.layers.*.mlp.up_proj.weight`). A region stands for all its instances,
so a pin covers a parameter in all of them or in none.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase

from meshfold.errors import OptionError
from meshfold.ir.op_graph import FoldedGraph, SourceKind
from meshfold.ir.options import LayoutPin
from meshfold.ir.spmd import SpmdType


class UnkeptPinError(Exception):
    """No typing of a region stores its parameters as pinned."""


PinnedSlots = Mapping[tuple[int, int], LayoutPin]
"""The pin of a parameter, by (region, slot)."""


def pinned_slots(folded: FoldedGraph, pins: tuple[LayoutPin, ...]) -> PinnedSlots:
    """The parameter slots that pins are about. Raises OptionError for a pin that matches no
    parameter or only some of those that share a region's slot, and for two that disagree."""
    names: dict[tuple[int, int], set[str]] = {}
    for instance in folded.instances:
        for i, source in enumerate(instance.sources):
            if source.kind is SourceKind.PARAMETER:
                names.setdefault((instance.region, i), set()).add(source.name)
    found: dict[tuple[int, int], LayoutPin] = {}
    for pin in pins:
        places = {place: _matching(of, pin) for place, of in names.items()}
        if not any(places.values()):
            raise OptionError(f"pin {pin}: no parameter is called {pin.pattern}")
        for place, matching in places.items():
            if not matching:
                continue
            rest = sorted(names[place] - matching)
            if rest:
                raise OptionError(
                    f"pin {pin}: {rest[0]} is stored alike, as layers of one kind are, and is not "
                    f"meant; use a pattern for all {len(names[place])} of them"
                )
            if place in found and found[place].value != pin.value:
                raise OptionError(f"pin {pin}: pin {found[place]} says otherwise")
            found[place] = pin
    return found


def _matching(names: set[str], pin: LayoutPin) -> set[str]:
    return {name for name in names if fnmatchcase(name, pin.pattern)}


def keeps_tp(pin: LayoutPin, stored: SpmdType) -> bool:
    """Whether a type on tp is what the pin says."""
    if pin.tp_dim is not None:
        return stored.is_shard and stored.dim == pin.tp_dim and stored.padded >= pin.is_padded
    return pin.on_dp or not stored.is_shard
