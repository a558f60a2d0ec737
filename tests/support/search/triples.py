"""Random (model, cluster, options) triples: a plan is refused with a clear error, or its program
computes what one process computes.

A model is one of the small Hugging Face ones, or is put together: an embedding or a convolution,
blocks [batch, sequence, width] -> alike in any order, and a head that may share the embedding's
weight. Sizes are drawn so that many do not divide. Everything follows from one seed.
"""

import contextlib
import itertools
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch import Tensor, nn

from meshfold.api import bind, plan_captured
from meshfold.capture.pipeline import Captured, capture
from meshfold.codegen.emit.pass_pipeline import emit
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.errors import MeshfoldError, PassError
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.custom_ops import CustomRule
from meshfold.ir.options import CompileOptions, PinValue
from meshfold.ir.plan import Plan
from meshfold.ir.strategy import ChunkDim, Chunking
from meshfold.passes.graph.variants import planned_graph
from meshfold.passes.split.chunk_graph import ChunkingError
from meshfold.passes.split.micro_chunks import ChunkingProblem
from meshfold.plan_file.io import plan_from_json, plan_to_json
from meshfold.training.shards.local_shard import local_tensor
from meshfold.validation.float64_mode import float64_everywhere
from support.models.blocks import Model, Sizes
from support.models.hugging_face import tiny_model
from support.processes.pool import Pools
from support.programs.emit import part_of
from support.programs.local_programs import Rank, errors_of_a_step, on_ranks, one_process
from support.programs.pipeline import without_start_up
from support.search.drawn_blocks import RULES, DrawnModel

TOLERANCE = 1e-10
"""Tolerance for the loss and every entry of every gradient."""
IGNORED = -100
NO_MORE_BLOCKS = 5000
"""Seeds from here on draw none of MORE_BLOCKS: some of them stand for what they found once."""
DRAWN_BLOCKS = 10000
"""Seeds from here on draw of all blocks, and models of several outputs."""


@dataclass(frozen=True)
class Triple:
    """A model with its batch, a cluster and options. dropout: whether the model draws masks, so
    that one process is its own program on one rank."""

    seed: int
    model: nn.Module
    batch: dict[str, Tensor]
    cluster: ClusterSpec
    options: CompileOptions
    dropout: bool
    text: str


def draw_triple(seed: int) -> Triple:
    draw = random.Random(seed)
    if draw.random() < 0.2 and seed < DRAWN_BLOCKS:
        family = draw.choice(("gpt2", "llama", "bert", "t5", "vit", "mixtral", "gpt_oss", "uneven"))
        layers, rows = draw.choice([1, 2]), draw.choice([1, 2, 3, 4])
        model, batch = tiny_model(family, layers=layers, seed=seed)
        batch = {name: value[:rows] for name, value in batch.items()}
        text, dropout = f"{family} of {layers} layers, batch {rows}", 0.0
    else:
        model, batch, dropout, text = _random_model(draw, seed)
    num_ranks = draw.choice([1, 2, 2, 3, 4, 4, 6, 8])
    cluster = _cluster(draw, num_ranks)
    options = _options(draw, model, len(batch["labels"]), cluster)
    text = f"{seed}: {text} on {num_ranks} of {cluster.name}, pins {dict(options.pins)}"
    if options.memory_bytes is not None:
        text += f", {options.memory_bytes} bytes"
    return Triple(seed, model, batch, cluster, options, dropout > 0, text)


def _random_model(
    draw: random.Random, seed: int
) -> tuple[nn.Module, dict[str, Tensor], float, str]:
    """A model of blocks, its batch, its dropout (above 0 if it draws), and what it is."""
    key_heads = draw.choice([1, 1, 2, 3, 4])
    sizes = Sizes(
        batch=draw.choice([1, 2, 3, 4, 4, 6, 8]),
        sequence=draw.choice([4, 4, 8, 9, 12]),
        key_heads=key_heads,
        heads=key_heads * draw.choice([1, 1, 2, 3]),
        head_dim=draw.choice([2, 3, 4]),
        hidden=draw.choice([8, 12, 15, 16, 24]),
        vocabulary=draw.choice([13, 16, 24, 37]),
    )
    dropout = draw.choice([0.0, 0.0, 0.3])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        more = random.Random(seed + 1)
        if seed >= DRAWN_BLOCKS:
            model: Model = DrawnModel(sizes, draw, dropout, more)
        else:
            model = Model(sizes, draw, dropout, more if seed < NO_MORE_BLOCKS else None)
        model.double().train()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        batch = _batch(model, sizes)
    is_random = float(getattr(model, "draws", False)) or dropout
    return model, batch, is_random, f"{model} {sizes} dropout={dropout}"


def _batch(model: Model, sizes: Sizes) -> dict[str, Tensor]:
    labels = torch.randint(0, sizes.vocabulary, (sizes.batch, sizes.sequence))
    # Uneven over rows: a wrong mean over ranks shows.
    labels[0, : sizes.sequence // 2] = IGNORED
    if model.stem == "tokens":
        return {"x": torch.randint(0, sizes.vocabulary, labels.shape), "labels": labels}
    rows, columns = {4: (4, 4), 8: (4, 8), 9: (6, 6), 12: (6, 8)}[sizes.sequence]
    return {"x": torch.randn(sizes.batch, 3, rows, columns, dtype=torch.float64), "labels": labels}


def _cluster(draw: random.Random, num_ranks: int) -> ClusterSpec:
    """Processes, or the first devices of a large machine; sometimes without start-up costs, so that
    bytes and work decide even here."""
    name = draw.choice(["local-cpu", "local-cpu", "dgx-a100-40"])
    cluster = resolve_cluster(name if name == "local-cpu" else f"{name}x1", num_ranks)
    return cluster if draw.random() < 0.5 else without_start_up(cluster)


def _options(
    draw: random.Random, model: nn.Module, batch: int, cluster: ClusterSpec
) -> CompileOptions:
    """Pins of at most one degree, mostly to what devices and batch allow, and one thing more."""
    num_ranks = cluster.num_devices
    degrees = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
    of_batch = [n for n in degrees if batch % n == 0 or draw.random() < 0.1]
    pins: dict[str, PinValue] = draw.choice(
        [
            *[{"tp": draw.choice(degrees)}] * 3,
            *[{"dp": draw.choice(of_batch)}] * 3,
            *[{"cp": draw.choice(degrees)}] * 2,
            {"ep": draw.choice(degrees)},
            *[{}] * 6,
        ]
    )
    name = ".*.".join(re.split(r"\.\d+\.", draw.choice([n for n, _ in model.named_parameters()])))
    layout = draw.choice(["replicate", "dp", "tp:0", "tp:1", "tp:0,dp"])
    pins |= draw.choice(
        [
            *[{"zero": draw.choice([0, 3, 3, 1])}] * 3,
            *[{"sp": draw.choice([0, 1])}] * 2,
            *[{"recompute": draw.choice(["none", "full", "heavy", "selective"])}] * 3,
            {f"layout:{name}": layout},
            *[{}] * 9,
        ]
    )
    # Some times the bytes of parameters, gradients and optimizer states.
    states = sum(4 * p.numel() * p.itemsize for p in model.parameters())
    times = draw.choice([None, None, None, None, 16, 8, 4, 1])
    memory = None if times is None else cluster.reserve_bytes + times * states
    return CompileOptions(memory_bytes=memory, pins=pins)


@dataclass(frozen=True)
class Outcome:
    """What became of a triple. refused: the message of a refusal; failed: what went wrong; worst:
    largest difference from one process; strategies: of the plan."""

    text: str
    refused: str = ""
    failed: str = ""
    worst: float = 0.0
    strategies: tuple[str, ...] = ()


def outcome_of(triple: Triple, pools: Pools, *, scheduled: bool = False) -> Outcome:
    """Plans, and runs one step: on simulated ranks, a plan with a schedule on processes of `pools`.
    Only captures and plans may be refused. scheduled: in that mode, regions in parts that are
    drawn."""
    options = replace(triple.options, mode="eager")
    if scheduled:
        options = replace(options, mode="scheduled", pins={**options.pins, "micro_chunks": 1})
    try:
        with float64_everywhere():
            captured = capture(triple.model, triple.batch, rules=_rules(triple))
        plan = plan_captured(captured, "random", triple.cluster, options)
        if scheduled and not plan.schedule:
            plan = _in_random_parts(plan, captured, random.Random(triple.seed))
    except MeshfoldError as error:
        clear = str(error).strip() and "\n" not in str(error) and not isinstance(error, PassError)
        why = "" if clear else f"refused without a clear error: {error!r}"
        return Outcome(triple.text, refused=str(error), failed=why)
    except Exception as error:  # what is no MeshfoldError is what this looks for
        return Outcome(triple.text, failed=f"not refused, but: {error!r}")
    strategies = tuple(dict.fromkeys(r.strategy.label for r in plan.regions))
    try:
        errors = _errors(triple, captured, plan, pools)
    except Exception as error:
        return Outcome(
            triple.text, failed=f"fails after planning: {error!r}", strategies=strategies
        )
    return compared(triple.text, errors, strategies)


def _rules(triple: Triple) -> tuple[CustomRule, ...]:
    """Of the Functions that the model may call."""
    return RULES if isinstance(triple.model, DrawnModel) else ()


def _in_random_parts(plan: Plan, captured: Captured, draw: random.Random) -> Plan:
    """The plan with every region in some number of parts in which it can run."""
    problem = ChunkingProblem(planned_graph(captured.graph, plan), plan)
    regions = []
    for k, region in enumerate(plan.regions):
        possible = [Chunking()]
        for of, count in itertools.product(get_args(ChunkDim), (2, 3, 4)):
            with contextlib.suppress(ChunkingError):
                problem.chunked(k, region.typing, Chunking(count, of))
                possible.append(Chunking(count, of))
        regions.append(replace(region, chunking=draw.choice(possible[1:] or possible)))
    return replace(plan, regions=tuple(regions))


def _errors(triple: Triple, captured: Captured, plan: Plan, pools: Pools) -> list[dict[str, float]]:
    """The differences from one process by rank (support.programs.local_programs)."""
    if plan.schedule:
        step = f"{__name__}:{errors_of_a_scheduled_step.__name__}"
        return pools.run(plan.world_size, step, triple.seed, plan_to_json(plan))
    program = emit(captured.graph, plan)
    right = _right(triple, captured)
    return errors_of_a_step(triple.model, triple.batch, captured, program, right)


def errors_of_a_scheduled_step(seed: int, plan_text: str) -> dict[str, float]:
    """The errors of this process, which may have some of the parameters only."""
    triple, plan = draw_triple(seed), plan_from_json(plan_text)
    with float64_everywhere():
        captured = capture(triple.model, triple.batch, rules=_rules(triple))
        compiled = bind(triple.model, plan, captured, triple.batch)
        expected, gradients = _right(triple, captured) or one_process(triple.model, triple.batch)
        errors = {"loss": float((compiled.train_step(triple.batch) - expected).abs())}
    for name, parameter in compiled.named_parameters():
        whole = gradients[name]
        right = 0.0 if whole is None else part_of(compiled, name, whole)
        errors[name] = float((_gradient(parameter) - right).abs().max())
    return errors


def _gradient(parameter: nn.Parameter) -> Tensor:
    return local_tensor(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)


def _right(triple: Triple, captured: Captured) -> tuple[Tensor, Mapping[str, Tensor | None]] | None:
    """What to compare with: the program of one rank where masks are drawn, which no unmodified
    model draws alike."""
    if not triple.dropout:
        return None
    cluster = resolve_cluster("local-cpu", 1)
    program = emit(captured.graph, plan_captured(captured, "one", cluster, CompileOptions()))

    def body(rank: Rank) -> tuple[Tensor, dict[str, Tensor | None]]:
        loss = rank.loss(triple.batch)
        loss.backward()
        return loss.detach(), {name: p.grad for name, p in rank.parameters.items()}

    (found,) = on_ranks(triple.model, captured, program, body)
    return found  # type: ignore[no-any-return]


def compared(
    text: str, errors: Sequence[Mapping[str, float]], strategies: tuple[str, ...]
) -> Outcome:
    wrong = [(error, name) for of_rank in errors for name, error in of_rank.items()]
    # A NaN is the largest.
    worst, name = max(wrong, key=lambda e: float("inf") if e[0] != e[0] else e[0])
    failed = "" if worst <= TOLERANCE else f"{name} differs by {worst:.1e}"
    return Outcome(text, failed=failed, worst=worst, strategies=strategies)
