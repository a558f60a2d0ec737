"""What searches for one model on one cluster and batch share, whatever their memory budget and the
pins about strategies: typed regions, simulated regions, prices of layers in a pipeline."""

from dataclasses import dataclass, field

from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.options import BATCH_NORM, CompileOptions
from meshfold.ir.strategy import Degrees
from meshfold.passes.memory.local_program import Probe
from meshfold.passes.memory.region import MemoryModel
from meshfold.passes.pipeline.problem import PipelineProblems
from meshfold.passes.region.space import SearchCache
from meshfold.passes.region.typing import MeshSearch
from meshfold.passes.split.chunked_losses import with_chunked_losses
from meshfold.passes.split.operator_slices import with_slices
from meshfold.passes.split.pieces import in_pieces


@dataclass(eq=False)
class TypedMeshes:
    """Region searches of the program in one pass, and their memory models, filled as meshes are
    asked for."""

    cache: SearchCache
    searches: dict[Degrees, MeshSearch] = field(default_factory=dict)
    memory_models: dict[MeshSearch, MemoryModel] = field(default_factory=dict)


class SharedWork:
    """For one folded graph, cluster, batch size and probe; empty until something is searched."""

    def __init__(self) -> None:
        self._meshes: dict[tuple[str, ...], TypedMeshes] = {}
        self._pieces: dict[int, FoldedGraph] = {}
        self._problems: dict[tuple[int, str, bool], PipelineProblems] = {}
        self._chunked: tuple[FoldedGraph, SharedWork] | None = None
        self._sliced: dict[int, tuple[FoldedGraph, SharedWork]] = {}

    def chunked(self, folded: FoldedGraph) -> tuple[FoldedGraph, "SharedWork"]:
        """The graph with chunked losses and what searches for that share; these where it has
        none."""
        if self._chunked is None:
            other = with_chunked_losses(folded)
            self._chunked = other, self if other is folded else SharedWork()
        return self._chunked

    def sliced(self, folded: FoldedGraph, count: int) -> tuple[FoldedGraph, "SharedWork"]:
        """The graph with operators in slices and what searches for that share; these where it has
        none."""
        if count not in self._sliced:
            other = with_slices(folded, count)
            self._sliced[count] = other, self if other is folded else SharedWork()
        return self._sliced[count]

    def meshes(self, folded: FoldedGraph, options: CompileOptions) -> TypedMeshes:
        """Those in which parameters are pinned as in `options`."""
        key = tuple(sorted(map(str, options.layout_pins)))
        if key not in self._meshes:
            self._meshes[key] = TypedMeshes(SearchCache.of(folded))
        return self._meshes[key]

    def pieces(self, folded: FoldedGraph, most_stages: int) -> FoldedGraph:
        """`folded`, or its layers cut so that there are enough of them for stages."""
        if most_stages not in self._pieces:
            self._pieces[most_stages] = in_pieces(folded, most_stages).folded
        return self._pieces[most_stages]

    def problems(
        self,
        folded: FoldedGraph,
        cluster: ClusterSpec,
        options: CompileOptions,
        batch_size: int,
        probe: Probe,
    ) -> PipelineProblems:
        """PipelineProblems for these options. Raises OptionError where the batch cannot be
        split."""
        key = id(folded), options.optimizer, BATCH_NORM in options.pins
        if key not in self._problems:  # which holds on to folded
            self._problems[key] = PipelineProblems(folded, cluster, options, batch_size, probe)
        return self._problems[key].within(options)
