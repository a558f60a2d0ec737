"""Types of a program that only runs forward, on parameters that are stored as another one has them.

A model computes something else for other arguments (no labels: logits, perhaps of the last token)
or in another mode, so its ops are typed anew, by the same region searches (passes/region), with the
stored layout of every parameter decided. Boundaries between regions are those of one mode of tp for
all layers. Nothing is priced against other strategies: there is no choice of mesh or memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from meshfold.errors import OptionError
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.mesh import Mesh
from meshfold.ir.op_graph import FoldedGraph, Instance, SourceKind
from meshfold.ir.spmd import INVARIANT, Layout
from meshfold.ir.strategy import RegionTyping, TpMode
from meshfold.passes.graph.variants import split_regions
from meshfold.passes.region.parameter_tables import Prices
from meshfold.passes.region.typing import MeshSearch


@dataclass(frozen=True)
class StoredParameter:
    """How a parameter lives between steps, and the same without the axes over which it is gathered
    for its ops (ZeRO)."""

    stored: Layout
    gathered: Layout


def forward_types(
    folded: FoldedGraph,
    cluster: ClusterSpec,
    mesh: Mesh,
    parameters: Mapping[str, StoredParameter],
    mode: TpMode,
) -> tuple[FoldedGraph, tuple[RegionTyping, ...]]:
    """(`folded` with its regions split where layers store their parameters differently, a typing
    per region). parameters: by name; those that are not there are Invariant.

    Raises OptionError where the ops of a region cannot read what is stored.
    """
    unsharded = (INVARIANT,) * len(mesh.axes)
    plain = StoredParameter(unsharded, unsharded)

    def stored(instance: Instance) -> tuple[tuple[int, StoredParameter], ...]:
        return tuple(
            (i, parameters.get(source.name, plain))
            for i, source in enumerate(instance.sources)
            if source.kind is SourceKind.PARAMETER
        )

    choices = [stored(instance) for instance in folded.instances]
    split = split_regions(folded, choices)
    of_region = {i.region: c for i, c in zip(split.instances, choices, strict=True)}
    kept = {(r, i): p.gathered for r, found in of_region.items() for i, p in found}
    search = MeshSearch(split, cluster, mesh, split.batch_size, kept=kept)
    return split, tuple(_typing(search, r, mode, of_region[r]) for r in range(len(split.regions)))


def _typing(
    search: MeshSearch, r: int, mode: TpMode, parameters: Sequence[tuple[int, StoredParameter]]
) -> RegionTyping:
    solution = search.problem(r, mode).solve(Prices())
    if solution is None:
        raise OptionError(
            f"region {search.folded.regions[r].name} cannot read its parameters as the plan stores "
            "them, with these arguments; evaluate with a model that is compiled for them"
        )
    slots = list(solution.typing.slots)
    for i, parameter in parameters:
        slots[i] = parameter.stored
    return replace(solution.typing, slots=tuple(slots))
