"""Step times of overlapped programs against others, on gloo, interleaved in one run.

    python benchmarks/overlap.py [--processes 2] [--rounds 9] [--layers 6] [--width 256] [--wire N]

One small Llama, for ep a Mixtral, the same batch and weights for all. Variants take turns, step by
step, so that what else the machine does meets all alike; every step is forward and backward,
without the optimizer, and counts from a barrier to the last rank. Medians and ratios.

    scheduled, eager     meshfold, the plan with the pins of its row, in both modes
    2 parts, 4 parts     scheduled, layers in as many parts whatever the cost model says
    one by one           eager, no reductions of gradients merged
    waiting              the eager program, nothing gathered ahead, every reduction waited for where
                         it starts: what overlap brings
    FSDP2, DDP, TP       fully_shard per layer, DistributedDataParallel, parallelize_module with
                         column and row parallel linears by hand
    no communication     one process's part of the batch under the model alone

gloo moves bytes with the cores that compute, so it hides little. With --wire collectives of
meshfold run over a serial link of so many MB/s that needs no core (measuring/emulated_link.py):
what there is to hide then shows; the others are left out, and plans are made for such a link.
Losses are compared first.

Last comes how often the simulator has the order right: of all pairs of meshfold's programs whose
medians differ by more than a tenth, the share that it has in the measured order. Plans are made for
this machine as it is in this run (benchmarks/measuring/here.py).
"""

import copy
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import click
import torch
import torch.distributed as dist
from measuring.emulated_link import EmulatedLink
from measuring.here import this_machine
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

import meshfold
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.distributed.local_processes import Report, run_local
from meshfold.ir.cluster import OVERLAP_SLOWDOWN, ClusterSpec
from meshfold.ir.options import CompileOptions
from meshfold.runtime.runner import ProgramRunner
from meshfold.training.compiled_model import CompiledModel

SAMPLES, SEQUENCE, VOCABULARY = 4, 64, 1024
PROFILE_MINUTES = 1.0
WARM_UP = 2
CLOSE = 1e-3
"""Of losses in float32; the mean over ranks of equal parts is the mean of all."""
COLUMN = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj")
ROW = ("self_attn.o_proj", "mlp.down_proj")

KINDS = {
    "zero3": {"dp": -1, "zero": 3},
    "dp": {"dp": -1, "zero": 0},
    "tp": {"tp": -1, "sp": 0},
    "tp+sp": {"tp": -1, "sp": 1},
    "ep": {"ep": -1, "zero": 0},
}
"""Pins by kind; a degree of -1 stands for all processes."""
IN_PARTS = ("tp", "tp+sp", "ep")
"""Kinds that communicate inside of layers."""
OURS = ("scheduled", "eager", "one by one", "waiting")
PARTS = (2, 4)
ALONE = "dp: no communication"
ALONE_WITH_EXPERTS = "ep: no communication"
DIFFER = 0.1
"""Relative, from which on the order of two medians counts."""

Step = Callable[[], Tensor]


def build_model(layers: int, width: int, *, has_experts: bool = False) -> PreTrainedModel:
    """The same weights in every process."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": SEQUENCE,
        "use_cache": False,
    }
    if not has_experts:
        return LlamaForCausalLM(LlamaConfig(**sizes))
    return MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=8, num_experts_per_tok=2))


def loss_step(model: nn.Module, batch: dict[str, Tensor]) -> Step:
    """Forward and backward of a model that returns a loss, or an output that has one."""

    def step() -> Tensor:
        model.zero_grad()
        output: Any = model(**batch)
        loss: Tensor = getattr(output, "loss", output)
        loss.backward()
        return loss.detach()

    return step


@dataclass(frozen=True)
class Programs:
    """Of one kind: steps by name, and the seconds that plans say a step takes."""

    steps: dict[str, Step]
    simulated_s: dict[str, float]


def meshfold_programs(
    model: nn.Module,
    batch: dict[str, Tensor],
    cluster: ClusterSpec,
    link: EmulatedLink | None,
    pins: dict[str, int],
    in_parts: bool,
) -> Programs:
    """Scheduled, in parts or not, eager, without merged reductions, and every collective waited for
    at once."""
    options = {
        "scheduled": CompileOptions(pins=pins, mode="scheduled"),
        "eager": CompileOptions(pins=pins),
        "one by one": CompileOptions(pins={**pins, "reduce_bucket_bytes": 0}),
    }
    for parts in PARTS if in_parts else ():
        options[f"{parts} parts"] = CompileOptions(
            pins={**pins, "micro_chunks": parts}, mode="scheduled"
        )
    steps: dict[str, Step] = {}
    simulated_s: dict[str, float] = {}
    for name, of in options.items():
        made = meshfold.compile(copy.deepcopy(model), cluster, batch, options=of)
        if link is not None:
            assert made.rank_mesh is not None
            link.connect(made.rank_mesh)
        steps[name] = loss_step(made, batch)
        assert made.plan.simulated is not None
        simulated_s[name] = made.plan.simulated.step_s - made.plan.time.optimizer_s
        if name == "eager":
            steps["waiting"] = waiting_step(made, batch)
    return Programs(steps, simulated_s)


def linked(cluster: ClusterSpec, emulated: EmulatedLink) -> ClusterSpec:
    """The cluster with this link, which disturbs no core."""
    (group,) = cluster.groups
    link = replace(group.link, bytes_per_s=emulated.bytes_per_s, start_s=emulated.start_s)
    device = replace(group.device, overlap_slowdown=OVERLAP_SLOWDOWN)
    return replace(cluster, groups=(replace(group, link=link, device=device),))


def waiting_step(made: CompiledModel, batch: dict[str, Tensor]) -> Step:
    assert isinstance(made.program, EmittedProgram) and made.rank_mesh is not None
    waiting = ProgramRunner(
        made.program, made.rank_mesh, made._form.captured.constants, waits_at_once=True
    )

    def step() -> Tensor:
        made.zero_grad()
        loss = made.run_with(waiting, batch)
        loss.backward()
        return loss.detach()

    return step


def variants(layers: int, width: int, wire: float) -> Programs:
    """By name; "X: A" and "X: B" are compared."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tokens = torch.randint(
        0, VOCABULARY, (SAMPLES * size, SEQUENCE), generator=torch.Generator().manual_seed(1)
    )
    batch = {"input_ids": tokens, "labels": tokens}
    part = {name: x.chunk(size)[rank] for name, x in batch.items()}
    model, with_experts = (build_model(layers, width, has_experts=has) for has in (False, True))
    mesh = init_device_mesh("cpu", (size,))

    sharded = copy.deepcopy(model)
    for layer in sharded.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)

    by_hand = copy.deepcopy(model)
    styles = {name: ColwiseParallel() for name in (*COLUMN, "mlp.up_proj")}
    styles |= {name: RowwiseParallel() for name in ROW}
    for layer in by_hand.model.layers:
        parallelize_module(layer, mesh, styles)

    alone = loss_step(copy.deepcopy(model), part)
    cluster = this_machine(PROFILE_MINUTES)
    link = EmulatedLink(wire) if wire else None
    if link is not None:
        cluster = linked(cluster, link)
    found: dict[str, Step] = {}
    simulated_s: dict[str, float] = {}
    for kind, pins in KINDS.items():
        pins = {k: size if v < 0 else v for k, v in pins.items()}
        of_kind = with_experts if "ep" in pins else model
        programs = meshfold_programs(of_kind, batch, cluster, link, pins, kind in IN_PARTS)
        found |= {f"{kind}: {name}": step for name, step in programs.steps.items()}
        simulated_s |= {f"{kind}: {name}": x for name, x in programs.simulated_s.items()}
    if not wire:
        found |= {
            "zero3: FSDP2": loss_step(sharded, part),
            "dp: DDP": loss_step(DistributedDataParallel(copy.deepcopy(model)), part),
            "tp: parallelize_module": loss_step(by_hand, batch),
        }
    found[ALONE] = alone
    found[ALONE_WITH_EXPERTS] = loss_step(copy.deepcopy(with_experts), part)
    return Programs(found, simulated_s)


def measure(
    report: Report, layers: int, width: int, rounds: int, wire: float
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of every step of every variant, from a barrier to the last rank; and as simulated."""
    programs = variants(layers, width, wire)
    steps = programs.steps
    losses = {}
    for name, step in steps.items():
        report(f"comparing losses: {name}")
        for _ in range(WARM_UP):
            loss = step()
        dist.all_reduce(loss)
        losses[name] = loss.item() / dist.get_world_size()
    for name, value in losses.items():
        alone = losses[ALONE_WITH_EXPERTS if name.startswith("ep: ") else ALONE]
        if abs(value - alone) > CLOSE:
            raise RuntimeError(f"{name} has the loss {value}, one process {alone}")
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        report(f"round {number + 1} of {rounds}")
        # Each comes first in some round, and behind others.
        first = number * len(steps) // rounds
        for name in (*list(steps)[first:], *list(steps)[:first]):
            dist.barrier()
            start = time.perf_counter()
            steps[name]()
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
    return seconds, programs.simulated_s


def order_text(medians: dict[str, float], simulated_s: dict[str, float]) -> str:
    pairs = [
        (a, b)
        for a, b in itertools.permutations(simulated_s, 2)
        if medians[a] > (1 + DIFFER) * medians[b]
    ]
    right = sum(simulated_s[a] > simulated_s[b] for a, b in pairs)
    return f"the simulator has {right} of {len(pairs)} pairs in the measured order"


@click.command()
@click.option("--processes", default=2, show_default=True)
@click.option("--rounds", default=9, show_default=True)
@click.option("--layers", default=6, show_default=True)
@click.option("--width", default=256, show_default=True)
@click.option("--wire", default=0.0, show_default=True, help="MB/s of an emulated link; 0: none.")
def main(processes: int, rounds: int, layers: int, width: int, wire: float) -> None:
    """Run all variants and print medians and ratios."""

    def tell(rank: int, what: str) -> None:
        if rank == 0:
            click.echo(what, err=True)

    ((seconds, simulated_s), *_) = run_local(
        processes, measure, layers, width, rounds, 1e6 * wire, on_report=tell, quiet=True
    )
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    click.echo(f"{processes} processes, {layers} layers of width {width}, {rounds} rounds")
    for name, median_s in medians.items():
        values = seconds[name]
        low, high = min(values), max(values)
        said = f", simulated {1e3 * simulated_s[name]:.1f}" if name in simulated_s else ""
        click.echo(
            f"{name:<28}{1e3 * median_s:>9.1f} ms  ({1e3 * low:.1f} to {1e3 * high:.1f}{said})"
        )
    for kind in KINDS:
        ours = medians[f"{kind}: {OURS[0]}"]
        for name, median_s in medians.items():
            other = name.removeprefix(f"{kind}: ")
            if other not in (name, OURS[0]):
                click.echo(f"{kind}: {OURS[0]} over {other:<24}{ours / median_s:>7.2f}")
    waiting, alone = medians["dp: waiting"], medians[ALONE]
    click.echo(order_text(medians, simulated_s))
    click.echo(f"communication is {100 * (1 - alone / waiting):.0f} % of dp's step when waited for")


if __name__ == "__main__":
    main()
