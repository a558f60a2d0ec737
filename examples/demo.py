"""`make demo`: a model from nn.Module to four training processes, and the same numbers as one.

Plans a small Llama for four local processes under a memory budget that plain data parallelism would
break, shows the plan beside what the baselines would cost, trains it on four gloo processes, trains
it in this process as well, and compares the losses. Then the same plan is proven in float64: loss,
every gradient, and parameters after steps of the optimizer, as `meshfold verify` does.
"""

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import meshfold
from meshfold.cost_models.hardware.shared_cores import resolve_here
from meshfold.distributed.local_processes import Report, run_local
from meshfold.report.plan import summary_view
from meshfold.units import count_text, parse_bytes, seconds_text
from meshfold.validation.report import report_view
from meshfold.validation.verify import verify

WORLD_SIZE = 4
BATCH, SEQUENCE, VOCABULARY = 8, 64, 1024
MEMORY = "24MB"
PLAN_FILE = Path("demo-out") / "plan.json"


def build_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=SEQUENCE,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def model_and_batch() -> tuple[LlamaForCausalLM, dict[str, torch.Tensor]]:
    """What `meshfold verify` is given as MODEL."""
    return build_model(), make_batch(0)


def make_batch(step: int) -> dict[str, torch.Tensor]:
    """Counting sequences with random starts: something to learn within seconds."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(0, VOCABULARY, (BATCH, 1), generator=generator)
    tokens = (start + torch.arange(SEQUENCE)) % VOCABULARY
    return {"input_ids": tokens, "labels": tokens}


def train(report: Report, model: torch.nn.Module, steps: int) -> tuple[list[float], list[float]]:
    """Losses, and seconds of steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, seconds = [], []
    for step in range(steps):
        start = time.perf_counter()
        loss = model(**make_batch(step))
        loss = getattr(loss, "loss", loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
        report(losses[-1])
    return losses, seconds


def train_one_rank(report: Report, plan_file: str, steps: int) -> tuple[list[float], list[float]]:
    """Runs on each of the four processes."""
    model = meshfold.compile(build_model(), "local-cpux4", make_batch(0), plan=plan_file)
    return train(report, model, steps)


def train_with_progress(
    console: Console, steps: int
) -> tuple[list[float], list[float], list[float]]:
    """Losses on four processes, and in this one; seconds of steps of rank 0 of the four."""
    columns = (TextColumn("{task.description:<15}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TextColumn("{task.fields[loss]}"), TimeElapsedColumn(), console=console
    ) as progress:
        many = progress.add_task(f"{WORLD_SIZE} processes", total=steps, loss="starting")
        one = progress.add_task("one process", total=steps, loss="waiting", start=False)

        def show(rank: int, loss: float) -> None:
            if rank == 0:
                progress.update(many, advance=1, loss=f"loss {loss:.4f}")

        (parallel, seconds), *_ = run_local(
            WORLD_SIZE, train_one_rank, str(PLAN_FILE), steps, on_report=show, quiet=True
        )
        torch.set_num_threads(1)
        progress.start_task(one)
        alone, _ = train(
            lambda loss: progress.update(one, advance=1, loss=f"loss {loss:.4f}"),
            build_model(),
            steps,
        )
    return parallel, alone, seconds


def comparison(parallel: list[float], alone: list[float]) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name in ("step", f"{WORLD_SIZE} processes", "one process", "difference"):
        table.add_column(name, justify="right")
    last = len(alone) - 1
    for step in sorted({*range(0, last, 4), last}):
        a, b = parallel[step], alone[step]
        table.add_row(str(step), f"{a:.6f}", f"{b:.6f}", f"{abs(a - b):.1e}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="Plan, train on four processes, compare.")
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    console = Console()
    model = build_model()
    num_parameters = count_text(sum(p.numel() for p in model.parameters()))
    console.rule(f"planning a Llama of {num_parameters} parameters, {MEMORY} per process")
    # A plain loop, as for the model alone, asks for plans that run a batch in one pass.
    options = meshfold.CompileOptions(memory_bytes=parse_bytes(MEMORY), pins={"microbatches": 1})
    cluster, notes = resolve_here("local-cpu", WORLD_SIZE)
    plan = meshfold.find_plan(model, cluster, make_batch(0), options=options)
    plan = replace(plan, notes=(*plan.notes, *notes))
    PLAN_FILE.parent.mkdir(exist_ok=True)
    meshfold.save_plan(plan, PLAN_FILE)
    console.print(summary_view(plan))
    console.rule(f"training {steps} steps")
    parallel, alone, seconds = train_with_progress(console, steps)
    step = plan.simulated.step_s if plan.simulated else plan.time.step_s
    measured = median(seconds[1:] or seconds)  # the first one allocates
    console.print(f"step predicted {seconds_text(step)}, measured {seconds_text(measured)}")
    console.rule("losses")
    console.print(comparison(parallel, alone))
    largest = max(abs(a - b) for a, b in zip(parallel, alone, strict=True))
    console.print(f"largest difference of {steps} losses: {largest:.1e}", style="bold green")
    console.rule("verifying in float64")
    with console.status(f"running {WORLD_SIZE} processes and the model alone"):
        report = verify(plan, f"{Path(__file__).stem}:model_and_batch")
    console.print(report_view(report))
    if not report.passed:
        raise SystemExit(report.verdict)
    console.print(f"more about the plan: meshfold show {PLAN_FILE}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        sys.exit(130)
