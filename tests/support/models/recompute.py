"""Programs whose regions are recomputed in the backward, and models that drop values."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from torch import Tensor, nn

from meshfold.capture.pipeline import Captured, capture
from meshfold.codegen.emit.region import emit_typed
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.strategy import SELECTIVE, Recompute, RegionTyping, UniformStrategy
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.memory.region import MemoryModel
from meshfold.passes.price.region import RegionPricer
from meshfold.passes.rules.typed import typed_rules
from meshfold.validation.float64_mode import float64_everywhere
from support.models.hugging_face import tiny_model
from support.programs.local_programs import emit_uniform

PROBABILITY = 0.25
PROBER = OpProber()


def dropping_model(family: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A tiny model in train mode, every dropout of which drops a quarter. T5 has layers that
    repeat."""
    model, batch = tiny_model(family, layers=3 if family == "t5" else 2)
    for module in model.modules():
        names = ["p"] if isinstance(module, nn.Dropout) else vars(module)
        for name in [n for n in names if n == "p" or "drop" in n]:
            if isinstance(getattr(module, name), float):
                setattr(module, name, PROBABILITY)
    return model.train(), batch


@cache
def captured_dropping(family: str) -> Captured:
    """dropping_model, captured in float64."""
    with float64_everywhere():
        return capture(*dropping_model(family))


@cache
def plain_program(family: str, strategy: UniformStrategy) -> EmittedProgram:
    """Of captured_dropping on four samples, without recomputation."""
    return emit_uniform(captured_dropping(family), strategy, 4)


def layer_regions(folded: FoldedGraph) -> set[int]:
    """Numbers of the regions that repeat."""
    counts = Counter(instance.region for instance in folded.instances)
    return {number for number, count in counts.items() if count > 1}


def recomputed(
    folded: FoldedGraph, typings: tuple[RegionTyping, ...], only_layers: bool
) -> list[RegionTyping]:
    """`typings` with full recomputation in the layers, or everywhere."""
    chosen = layer_regions(folded) if only_layers else set(range(len(typings)))
    return [replace(t, recompute="full") if k in chosen else t for k, t in enumerate(typings)]


def selective(
    folded: FoldedGraph,
    typings: Sequence[RegionTyping],
    costs: CostModel,
    *,
    only_layers: bool,
    recompute: Recompute = "selective",
) -> list[RegionTyping]:
    """`typings` with selective recomputation in the layers, or everywhere."""
    model = MemoryModel(costs, PROBER)
    layers, found = layer_regions(folded), []
    for number, (region, typing) in enumerate(zip(folded.regions, typings, strict=True)):
        if only_layers and number not in layers:
            found.append(typing)
            continue
        floats = next(i.floats for i in folded.instances if i.region == number)
        rules = typed_rules(region.graph, typing, region.name, costs.mesh)
        pricer = RegionPricer(region.graph, typing, rules, costs)
        kept = model.selective(region.graph, typing, floats, pricer)[recompute].kept
        found.append(replace(typing, recompute=recompute, kept=kept))
    return found


def emit_recomputed(
    program: EmittedProgram, *, only_layers: bool = False, recompute: Recompute = "full"
) -> EmittedProgram:
    """`program` with recomputation in the layers, or everywhere."""
    costs = CostModel(resolve_cluster("local-cpu", program.mesh.num_ranks), program.mesh)
    if recompute in SELECTIVE:
        typings = selective(
            program.folded,
            program.typings,
            costs,
            only_layers=only_layers,
            recompute=recompute,
        )
    else:
        typings = recomputed(program.folded, program.typings, only_layers)
    return emit_typed(program.folded, typings, costs)


class LoggedRuns(nn.Module):
    """A region graph that notes when it runs, and with what arguments."""

    def __init__(self, graph: Callable[..., Any], log: list[tuple[Any, ...]]) -> None:
        super().__init__()
        self.graph = graph
        self.log = log

    def forward(self, *arguments: Any) -> Any:
        self.log.append(arguments)
        return self.graph(*arguments)
