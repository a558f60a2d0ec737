"""CPU time, proof and outcome of whole plans, beyond capture and imports.

    python benchmarks/plan.py [--mode MODE] [--depth] [--devices] [--memory] [--selective]
                              [--largest] [--operators] [--distinct N] [--evaluation]
    python benchmarks/plan.py --pins N [--published N] [--only NAME] [--results FILE]

One row a plan: step time, peak memory, optimality gap, programs priced, CPU seconds, in which its
finalists are emitted and simulated, too. --mode: eager or scheduled; else the faster. --depth plans
one model at 12 to 96 layers, once with memory for all and once with budgets that bind alike (where
memory binds, more programs are priced, whatever the depth), --devices at 8 to 16,384 devices: what
counts there is the last row over the first. Every plan runs twice and the second is measured: the
first brings in what torch imports late. --memory measures how much the resident memory of a fresh
process grows from the imports to its peak, for capture and plan: a tiny model goes first and brings
in the imports. --distinct plans N / 4, N / 2 and N layers that are all different, so that nothing
folds: seconds per layer should stay while memory does not bind; at 1,000 layers it does, more
meshes are planned, and a layer takes about twice as long. --selective has, per sample and
layer, what each point of selective recomputation keeps and adds, and compares that with the mix of
layers that keep all and layers that keep nothing, at the same bytes. --largest looks for the
deepest model that fits a node of A100s of 40 GB, without and with the host's memory. --operators
plans OSDP's published case: which parameters are sharded, all or as the search chooses, and large
operators in slices. --evaluation takes the price of one plan without a pipeline, of Llama-3-8B and
GPT-3. --pins and
--published hold the plan that the search chooses against N random sets of pins per setup, and
against N published plans (pinning/race.py); they end with 1 where one is faster.
"""

import json
import multiprocessing
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import get_args

import click
from pinning.race import race, race_all_published
from zoo.distinct import TOKENS, distinct_model

from meshfold.capture.pipeline import capture
from meshfold.cost_models.hardware.devices import cluster as preset
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.errors import InfeasibleError
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.options import CompileOptions, ModeChoice, PinValue, Precision, PrecisionChoice
from meshfold.ir.plan import Plan
from meshfold.ir.strategy import SELECTIVE, Recompute, TpMode
from meshfold.memory_probe.prober import OpProber
from meshfold.models.from_argument import build_model
from meshfold.passes.memory.region import MemoryModel
from meshfold.passes.memory.typed_region import TypedRegion
from meshfold.passes.planner.assembly import PlanRequest
from meshfold.passes.planner.check import price_plan
from meshfold.passes.planner.find import find_finalists
from meshfold.passes.region.typing import MeshSearch
from meshfold.passes.split.as_planned import as_planned
from meshfold.refine.finalists import fastest
from meshfold.units import bytes_text, seconds_text

CONFIGS = Path(__file__).parent.parent / "examples" / "configs"
SEQUENCE = 2048
GPT_1T = {"n_layer": 128, "n_embd": 25600, "n_head": 160}
"""The largest row of Narayanan et al. 2021 (arXiv:2104.04473): 1 trillion parameters."""


NO_PINS: Mapping[str, PinValue] = MappingProxyType({})


@dataclass(frozen=True)
class Case:
    """A model (a configuration file with fields replaced), a cluster, a global batch, a budget."""

    name: str
    config: str
    cluster: str
    batch: int
    fields: tuple[tuple[str, int], ...] = ()
    memory_bytes: int | None = None


CASES = (
    Case("Llama-3-8B", "llama-3-8b", "dgx-h100x8", 64),
    Case("GPT-3 175B", "gpt3-175b", "dgx-a100-80x128", 1536),
    Case("GPT 1T", "gpt3-175b", "dgx-h200x384", 1536, tuple(GPT_1T.items())),
    Case("Llama-3-405B", "llama-3-405b", "dgx-h100x2048", 2048),
    Case("Mixtral-8x7B", "mixtral-8x7b", "dgx-h100x8", 64),
    Case("DeepSeek-V3", "deepseek-v3", "dgx-h100x256", 4096),
)
BUDGETS_GB = {12: 14, 24: 24, 48: 43, 96: 85}
"""By layers: with these every depth recomputes."""


def depths(*, binds: bool) -> tuple[Case, ...]:
    """GPT-3 in four depths. binds: with the budget that makes each recompute, else with plenty."""
    plenty_gb = 400
    return tuple(
        Case(
            f"GPT-3, {n} layers",
            "gpt3-175b",
            "dgx-a100-80x16",
            256,
            (("n_layer", n),),
            (budget_gb if binds else plenty_gb) * 10**9,
        )
        for n, budget_gb in BUDGETS_GB.items()
    )


EVALUATIONS = 10
"""Of one plan; the first bring in what is kept between them."""

DEVICES = tuple(
    Case(f"Llama-3-8B, {8 * n} devices", "llama-3-8b", f"dgx-h100x{n}", 8 * n)
    for n in (1, 8, 64, 512, 2048)
)


def graph_of(case: Case, sequence: int = SEQUENCE, precision: Precision = "model") -> FoldedGraph:
    """The folded graph of a case's model; no weights are made. precision: "model" has weights and
    states of the configuration's dtype."""
    fields = json.loads((CONFIGS / f"{case.config}.json").read_text()) | dict(case.fields)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(fields))
        built = build_model(str(path), batch=case.batch, sequence=sequence)
    return capture(built.model, built.example_inputs, precision=precision).graph


def planned(
    graph: FoldedGraph,
    cluster: ClusterSpec,
    case: Case,
    pins: Mapping[str, PinValue] = NO_PINS,
    mode: ModeChoice = "auto",
    precision: PrecisionChoice = "auto",
) -> tuple[Plan, float]:
    """The plan and the CPU seconds it took. precision: what the graph was captured in."""
    start = time.process_time()
    options = CompileOptions(
        memory_bytes=case.memory_bytes, pins=pins, mode=mode, precision=precision
    )
    of = graph, cluster, options, case.name, case.batch, OpProber()
    finalists = find_finalists(PlanRequest(*of, wants_rivals=True))
    plan = fastest(finalists, as_planned(graph, finalists[0]), options).plan
    return plan, time.process_time() - start


def measure_distinct(most: int) -> None:
    """Print what layers that are all different take, on 8 devices."""
    click.echo(f"{'all different':<24}{'regions':>8}{'CPU s':>8}{'ms a layer':>12}")
    for num_layers in sorted({max(1, most // 4), max(1, most // 2), most}):
        case = Case(f"{num_layers} layers", "", "dgx-h100x1", TOKENS)
        graph = capture(*distinct_model(num_layers)).graph
        plan, cpu_s = planned(graph, preset(case.cluster), case)
        click.echo(
            f"{case.name:<24}{len(graph.regions):>8,}{cpu_s:>8.2f}"
            f"{1e3 * cpu_s / num_layers:>12.1f}  {plan.strategy.label}"
        )


def measure(cases: tuple[Case, ...], mode: ModeChoice) -> None:
    """Print the table of some cases, in the precision that `meshfold plan` takes."""
    click.echo(
        f"{'':<24}{'devices':>8}{'step':>10}{'peak':>9}{'gap':>8}{'unproven':>10}{'priced':>7}"
        f"{'CPU s':>8}"
    )
    seconds = []
    for case in cases:
        cluster = preset(case.cluster)
        precision = CompileOptions().precision_on(cluster)
        graph = graph_of(case, precision=precision)
        planned(graph, cluster, case, mode=mode, precision=precision)
        plan, cpu_s = planned(graph, cluster, case, mode=mode, precision=precision)
        seconds.append(cpu_s)
        click.echo(
            f"{case.name:<24}{cluster.num_devices:>8,}{seconds_text(plan.step_s):>10}"
            f"{bytes_text(plan.memory.peak):>9}{100 * plan.gap:>7.2f}%"
            f"{100 * plan.unproven_gap:>9.2f}%"
            f"{plan.search.num_priced:>7}{cpu_s:>8.2f}  {plan.strategy.label}, {plan.mode}"
        )
    click.echo(f"last over first: {seconds[-1] / seconds[0]:.2f} x\n")


def measure_evaluation(cases: tuple[Case, ...]) -> None:
    """Print what the price of one whole plan without a pipeline takes: from nothing but graph and
    plan, as `meshfold check` has it, the best of EVALUATIONS; and in a search, whose programs share
    tables, all that the search does divided by the programs that it priced."""
    click.echo(f"{'one evaluation':<24}{'check':>12}{'in a search':>14}")
    for case in cases:
        graph, cluster = graph_of(case), preset(case.cluster)
        pins = {"pp": 1, "microbatches": 1}
        planned(graph, cluster, case, pins)
        plan, cpu_s = planned(graph, cluster, case, pins)
        probe, seconds = OpProber(), list[float]()
        for _ in range(EVALUATIONS):
            start = time.process_time()
            price_plan(graph, plan, probe)
            seconds.append(time.process_time() - start)
        click.echo(
            f"{case.name:<24}{1e3 * min(seconds):>9.1f} ms"
            f"{1e3 * cpu_s / plan.search.num_priced:>11.1f} ms  {plan.strategy.label}"
        )


def resident_bytes() -> int:
    """Resident memory of this process now (Linux)."""
    num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return num_pages * resource.getpagesize()


def peak_bytes() -> int:
    """Largest resident memory that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def grown_bytes(case: Case) -> tuple[int, int]:
    """(resident memory after imports, growth from there to the peak). For a fresh process."""
    tiny = Case("tiny", "llama-tiny", "dgx-h100x1", 8)
    planned(graph_of(tiny), preset(tiny.cluster), tiny)
    imported = resident_bytes()
    planned(graph_of(case), preset(case.cluster), case)
    return imported, peak_bytes() - imported


def measure_memory(cases: tuple[Case, ...]) -> None:
    """Print the growth of memory of some cases, a fresh process each."""
    click.echo(f"{'resident memory':<24}{'imports':>10}{'beyond':>10}")
    for case in cases:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            imported, grown = pool.apply(grown_bytes, (case,))
        click.echo(f"{case.name:<24}{bytes_text(imported):>10}{bytes_text(grown):>10}")


LAYERS = (
    ("Llama-3-8B", "llama-3-8b", "dgx-h100x1", 1, (("num_hidden_layers", 4),)),
    ("Llama-3-8B", "llama-3-8b", "dgx-h100x1", 4, (("num_hidden_layers", 4),)),
    ("GPT-3 175B", "gpt3-175b", "dgx-a100-80x1", 1, (("n_layer", 4),)),
    ("GPT-3 175B", "gpt3-175b", "dgx-a100-80x1", 8, (("n_layer", 4),)),
)
"""Name, configuration, cluster, tp, fields."""


def measure_selective() -> None:
    """Print the table of layers."""
    click.echo(f"{'':<24}{'point':<10}{'keeps':>9}{'adds':>10}{'of the mix':>12}")
    for name, config, cluster, tp, fields in LAYERS:
        graph = graph_of(Case(name, config, cluster, 8, fields))
        mesh = build_mesh(preset(cluster), 8 // tp, tp)
        search = MeshSearch(graph, preset(cluster), mesh, 8)
        modes: tuple[TpMode, ...] = ("tensor", "sequence") if tp > 1 else ("tensor",)
        for mode in modes:
            layer = name + f", tp{tp}" + ("+sp" if mode == "sequence" else "")
            for point, num_bytes, added_s, share in _curve(graph, search, mode):
                click.echo(
                    f"{layer:<24}{point:<10}{bytes_text(num_bytes):>9}"
                    f"{seconds_text(added_s):>10}{share:>12}"
                )


def _curve(
    graph: FoldedGraph, search: MeshSearch, mode: TpMode
) -> Iterator[tuple[Recompute, int, float, str]]:
    """Of the layer that occurs most, for each point: bytes kept, seconds added, and these over what
    the mix of keeping all and nothing adds at the same bytes."""
    typings = search.solve(zero=0, mode=mode).typings
    (r, _), *_ = Counter(i.region for i in graph.instances).most_common(1)
    pricer = search.solutions(mode)[r].pricer
    floats = next(i.floats for i in graph.instances if i.region == r)
    region, model = graph.regions[r].graph, MemoryModel(search.costs, OpProber())
    typed = TypedRegion(region, typings[r], pricer, model, floats)
    full = typed.price("full").recomputed
    full_s, all_bytes = full.compute_s + full.graph_s, typed.memory("none").saved_bytes
    for recompute in typed.distinct(get_args(Recompute)):
        num_bytes = typed.memory(recompute).saved_bytes
        added = full if recompute == "full" else typed.added(recompute)
        added_s = added.compute_s + added.graph_s if added else 0.0
        of_mix_s = full_s * (1 - num_bytes / all_bytes)
        share = f"{added_s / of_mix_s:.2f}" if recompute in SELECTIVE else ""
        yield recompute, num_bytes, added_s, share


def measure_largest() -> None:
    """Print the deepest GPT of 8,192 hidden features that trains on one node of eight A100s of
    40 GB, one sample of 2,048 tokens on each, without offload and with it."""
    click.echo(f"{'':<24}{'layers':>8}{'parameters':>12}{'step':>10}{'peak':>9}  plan")
    for name, pins in (("without offload", {"offload": "none"}), ("with offload", {})):
        fitting, most, best = 1, 256, None
        while fitting < most:
            middle = (fitting + most + 1) // 2
            fields = (("n_layer", middle), ("n_embd", 8192), ("n_head", 64))
            case = Case(name, "gpt3-175b", "dgx-a100-40", 8, fields)
            try:
                plan, _ = planned(graph_of(case), preset(case.cluster), case, pins)
                fitting, best = middle, plan
            except InfeasibleError:
                most = middle - 1
        if best is not None:
            click.echo(
                f"{name:<24}{fitting:>8}{best.model.num_parameters / 1e9:>10.1f} B"
                f"{seconds_text(best.step_s):>10}{bytes_text(best.memory.peak):>9}  "
                f"{best.strategy.label}"
            )


OSDP = (("n_layer", 48), ("n_embd", 2048), ("n_head", 32))
OSDP_BYTES = 8 * 10**9
"""The case of Jiang et al. 2023 (arXiv:2209.13258): a GPT-2 on eight GPUs with 8 GB each for what
the program allocates."""
OSDP_SEQUENCE = 512


def measure_operators() -> None:
    """Print OSDP's case, without offload."""
    cluster = preset("titan-rtx")
    case = Case("GPT-2", "gpt2", "titan-rtx", 8, OSDP, OSDP_BYTES + cluster.reserve_bytes)
    graph = graph_of(case, OSDP_SEQUENCE)
    fixed: dict[str, PinValue] = {"dp": 8, "microbatches": 1, "offload": "none"}
    rows: dict[str, dict[str, PinValue]] = {
        "all sharded": {"zero": 3},
        "as chosen": {},
        "all sharded, 4 slices": {"zero": 3, "slices": 4},
        "as chosen, 4 slices": {"slices": 4},
    }
    click.echo(f"{'':<24}{'step':>9}{'added up':>10}{'allocated':>11}{'of 8 GB':>9}")
    for name, pins in rows.items():
        plan, _ = planned(graph, cluster, case, {**fixed, **pins})
        allocated = plan.memory.peak - plan.memory.reserve
        click.echo(
            f"{name:<24}{seconds_text(plan.step_s):>9}{seconds_text(plan.time.step_s):>10}"
            f"{bytes_text(allocated):>11}{allocated / OSDP_BYTES:>9.1%}"
        )


@click.command()
@click.option("--mode", type=click.Choice(get_args(ModeChoice)), default="auto")
@click.option("--depth", is_flag=True, help="12 to 96 layers.")
@click.option("--devices", is_flag=True, help="8 to 16,384 devices.")
@click.option("--memory", is_flag=True, help="Peak memory beyond imports.")
@click.option("--selective", is_flag=True, help="Selective recomputation, layer by layer.")
@click.option("--largest", is_flag=True, help="The largest model with and without offload.")
@click.option("--operators", is_flag=True, help="OSDP's case: shards and slices of operators.")
@click.option("--distinct", type=click.IntRange(1), help="Layers that are all different.")
@click.option("--evaluation", is_flag=True, help="The price of one plan.")
@click.option("--pins", type=click.IntRange(1), help="Random pins per setup.")
@click.option("--published", type=click.IntRange(1), help="Published plans.")
@click.option("--only", default="", help="Of the setups of --pins, those with this in the name.")
@click.option("--results", type=click.Path(path_type=Path), help="Where plans are kept.")
def main(
    mode: ModeChoice,
    depth: bool,
    devices: bool,
    memory: bool,
    selective: bool,
    largest: bool,
    operators: bool,
    distinct: int | None,
    evaluation: bool,
    pins: int | None,
    published: int | None,
    only: str,
    results: Path | None,
) -> None:
    """Plan the cases and print what it took."""
    if pins or published:
        num_faster = race(pins, results, only) if pins else 0
        num_faster += race_all_published(published, results) if published else 0
        sys.exit(1 if num_faster else 0)
    tables = (depth, devices, memory, selective, largest, operators, distinct, evaluation)
    if not any(tables):
        measure(CASES, mode)
    if depth:
        for binds in (False, True):
            click.echo("memory binds alike" if binds else "memory for all")
            measure(depths(binds=binds), mode)
    if devices:
        measure(DEVICES, mode)
    if memory:
        measure_memory(CASES)
    if selective:
        measure_selective()
    if largest:
        measure_largest()
    if operators:
        measure_operators()
    if distinct:
        measure_distinct(distinct)
    if evaluation:
        measure_evaluation(CASES[:2])


if __name__ == "__main__":
    main()
