"""Predicted against measured memory of one training step on this machine's CPU.

    python benchmarks/memory.py [--families gpt2,llama] [--dropout 0.1]
        [--recompute selective] [--chunked-loss] [--slices N] [--budgets N]

Each row captures a model with random weights, predicts its step in one process, and runs the
captured graph, or with dropout the emitted program: what autograd keeps is read by its hooks, the
peak from the CPU allocator's own events (the profiler's), parameters, buffers and batch not
included. The shapes put the peak in different places:

    act   long sequences, few parameters: at the start of the backward, inside a layer
    par   few tokens, wide layers: at the end of the backward, in the gradients
    mix   between, with a large vocabulary: in the head

With --recompute full the layers keep nothing and run again in the backward, in an emitted program;
with --recompute selective they keep what the planner chooses. With --chunked-loss losses make their
logits in chunks (the pin chunked_loss), where they can. --slices N is about the programs of 8 ranks
under ZeRO 3 in their place, one sample a rank: their largest operators in up to N slices.

With --budgets N it draws N plans at random, model, mechanism, ranks and budget, and holds what a
step of the emitted program takes against the budget (measuring/budgets.py). The table has the error
of the prediction per mechanism; exits 1 where one plan is above its budget.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import click
import torch
import transformers

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))  # support/

from measuring.budgets import Models, drawn, outcome, summary
from measuring.operator_slices import NUM_RANKS, sliced_peaks
from support.models.recompute import recomputed, selective
from support.programs.memory import (
    EmittedStep,
    RealStep,
    allocator_peak_bytes,
    plain_typings,
    saved_bytes,
)
from torch import nn

from meshfold.codegen.emit.region import emit_typed
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.cost_models.hardware.devices import cluster
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.ir.mesh import Mesh
from meshfold.ir.strategy import Recompute
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.memory.region import MemoryModel
from meshfold.passes.split.chunked_losses import with_chunked_losses

MIB = 2**20


@dataclass(frozen=True)
class Shape:
    name: str
    layers: int
    hidden: int
    heads: int
    batch: int
    sequence: int
    vocabulary: int


SHAPES = (
    Shape("act", layers=6, hidden=64, heads=4, batch=2, sequence=128, vocabulary=64),
    Shape("par", layers=3, hidden=256, heads=4, batch=2, sequence=8, vocabulary=64),
    Shape("mix", layers=3, hidden=128, heads=4, batch=4, sequence=32, vocabulary=4096),
)

Build = Callable[[Shape, float], nn.Module]


def text_sizes(s: Shape) -> dict[str, Any]:
    return {"vocab_size": s.vocabulary, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2}


def decoder_sizes(s: Shape) -> dict[str, Any]:
    return {
        **text_sizes(s),
        "num_hidden_layers": s.layers,
        "hidden_size": s.hidden,
        "intermediate_size": 2 * s.hidden,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.heads // 2,
        "max_position_embeddings": s.sequence,
    }


def encoder_sizes(s: Shape, dropout: float) -> dict[str, Any]:
    return {
        "num_hidden_layers": s.layers,
        "hidden_size": s.hidden,
        "intermediate_size": 4 * s.hidden,
        "num_attention_heads": s.heads,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
    }


def gpt2(s: Shape, dropout: float) -> nn.Module:
    config = transformers.GPT2Config(
        **text_sizes(s),
        n_layer=s.layers,
        n_embd=s.hidden,
        n_head=s.heads,
        n_positions=s.sequence,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        resid_pdrop=dropout,
    )
    return transformers.GPT2LMHeadModel(config)


def llama(s: Shape, dropout: float) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**decoder_sizes(s)))


def mixtral(s: Shape, dropout: float) -> nn.Module:
    config = transformers.MixtralConfig(
        **decoder_sizes(s), num_local_experts=4, num_experts_per_tok=2
    )
    model = transformers.MixtralForCausalLM(config)
    model.config._experts_implementation = "eager"
    return model


def bert(s: Shape, dropout: float) -> nn.Module:
    config = transformers.BertConfig(
        **encoder_sizes(s, dropout),
        vocab_size=s.vocabulary,
        max_position_embeddings=s.sequence,
    )
    return transformers.BertForMaskedLM(config)


def t5(s: Shape, dropout: float) -> nn.Module:
    config = transformers.T5Config(
        **text_sizes(s),
        num_layers=s.layers,
        d_model=s.hidden,
        d_kv=s.hidden // s.heads,
        d_ff=4 * s.hidden,
        num_heads=s.heads,
        dropout_rate=dropout,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def vit(s: Shape, dropout: float) -> nn.Module:
    side = max(1, round(s.sequence**0.5))
    config = transformers.ViTConfig(
        **encoder_sizes(s, dropout), image_size=4 * side, patch_size=4, num_labels=8
    )
    return transformers.ViTForImageClassification(config)


FAMILIES: dict[str, Build] = {
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "t5": t5,
    "vit": vit,
    "mixtral": mixtral,
}


def batch_for(model: nn.Module, s: Shape) -> dict[str, torch.Tensor]:
    if isinstance(model, transformers.ViTForImageClassification):
        size = model.config.image_size
        pixels = torch.randn(s.batch, 3, size, size)
        return {"pixel_values": pixels, "labels": torch.randint(0, 8, (s.batch,))}
    tokens = torch.randint(1, s.vocabulary, (s.batch, s.sequence))
    return {"input_ids": tokens, "labels": tokens.clone()}


def measured(
    model: nn.Module, step: RealStep, program: EmittedProgram, batch: dict[str, torch.Tensor]
) -> tuple[int, int]:
    """(bytes kept after the forward, bytes at the worst moment). Dropout is as programs draw it."""
    if model.training or any(region.recompute != "none" for region in program.regions):
        emitted = EmittedStep(model, step.captured, program, batch)
        return emitted.counted_kept_bytes(), allocator_peak_bytes(emitted.train)

    def fresh() -> None:
        step.train()
        for p in step.parameters:
            p.grad = None

    peak = allocator_peak_bytes(fresh)
    return saved_bytes(step), peak


def row(family: str, s: Shape, dropout: float, recompute: Recompute, is_chunked: bool) -> str:
    """One line of the table."""
    torch.manual_seed(0)
    model = FAMILIES[family](s, dropout).train(dropout > 0)
    batch = batch_for(model, s)
    step = RealStep(model, batch, with_chunked_losses if is_chunked else lambda graph: graph)
    mesh = Mesh(())
    costs = CostModel(cluster("local-cpu"), mesh)
    typings = plain_typings(step.folded)
    if recompute == "selective":
        typings = selective(step.folded, typings, costs, only_layers=True)
    if recompute == "full":
        typings = recomputed(step.folded, tuple(typings), only_layers=True)
    start = time.perf_counter()
    estimate, kept = MemoryModel(costs, OpProber()).step(
        step.folded,
        typings,
        optimizer="sgd",
        reserve_bytes=0,
        capacity_bytes=2**40,
    )
    seconds = time.perf_counter() - start
    inputs = sum(t.nbytes for t in batch.values())
    peak = estimate.gradients + estimate.activations + estimate.transient + estimate.loss - inputs
    saved = sum(kept[i.region] for i in step.folded.instances)
    real, worst = measured(model, step, emit_typed(step.folded, typings, costs), batch)
    return (
        f"{family:8} {s.name:4} {saved / MIB:9.3f} {real / MIB:9.3f} {saved / real - 1:+8.2%}"
        f" {peak / MIB:9.3f} {worst / MIB:9.3f} {peak / worst - 1:+8.2%} {seconds:7.2f}"
    )


def print_sliced(families: str, dropout: float, most: int) -> None:
    """The table of programs with 1, 2, 4, ... slices, of rank 0 without peers."""
    print(
        f"{'model':8} {'':4} {'slices':>6} {'predicted':>9} {'counted':>9} {'allocated':>9} error"
    )
    for family in families.split(","):
        for s in (replace(s, batch=NUM_RANKS, layers=3) for s in SHAPES):
            torch.manual_seed(0)
            model = FAMILIES[family](s, dropout).train(dropout > 0)
            batch = batch_for(model, s)
            for count in (2**k for k in range(most.bit_length())):
                peaks = sliced_peaks(model, batch, count)
                sizes = peaks.predicted, peaks.counted, peaks.allocated
                text = " ".join(f"{x / MIB:9.3f}" for x in sizes)
                error = peaks.predicted / peaks.allocated - 1
                print(f"{family:8} {s.name:4} {count:6} {text} {error:+.2%}", flush=True)


def print_budgets(count: int, seed: int) -> bool:
    """A line per plan, then one per mechanism. Returns whether all are in their budget."""
    models, found = Models(), []
    print(f"{'':32} {'budget':>9} {'predicted':>9} {'counted':>9} error")
    for draw in drawn(count, seed):
        name = f"{draw.family:8} {draw.mechanism:20} {draw.num_ranks}"
        one = outcome(draw, models)
        if one is None:
            print(f"{name:32} no such plan", flush=True)
            continue
        found.append(one)
        sizes = " ".join(f"{x / MIB:9.4f}" for x in (one.budget, one.predicted, one.counted))
        above = "" if one.fits else ", ABOVE THE BUDGET"
        print(f"{name:32} {sizes} {one.error:+.2%} {one.strategy}{above}", flush=True)
    print("\n".join(summary(found)))
    above = sum(not x.fits for x in found)
    print(f"{len(found)} plans, {above} above their budget")
    return not above


@click.command()
@click.option("--families", default=",".join(FAMILIES), help="Comma-separated.")
@click.option("--dropout", default=0.0, help="Of the families that have dropout.")
@click.option("--recompute", type=click.Choice(get_args(Recompute)), default="none")
@click.option("--chunked-loss", is_flag=True, help="Losses make their logits in chunks.")
@click.option("--slices", type=click.IntRange(2), help="Operators in slices under ZeRO 3.")
@click.option("--budgets", type=click.IntRange(1), help="Random plans under budgets.")
@click.option("--seed", default=0, help="Of these.")
def main(
    families: str,
    dropout: float,
    recompute: Recompute,
    chunked_loss: bool,
    slices: int | None,
    budgets: int | None,
    seed: int,
) -> None:
    """Print the table, sizes in MiB, seconds to predict with all probes new."""
    torch.set_num_threads(1)
    # oneDNN convolutions take scratch memory that no dispatcher sees.
    torch.backends.mkldnn.enabled = False
    if budgets:
        sys.exit(0 if print_budgets(budgets, seed) else 1)
    if slices:
        print_sliced(families, dropout, slices)
        return
    print(f"{'':13} {'kept for backward':^28} {'peak beside states':^28} predict")
    print(
        f"{'model':8} {'':4} {'predicted':>9} {'measured':>9} {'error':>8}"
        f" {'predicted':>9} {'measured':>9} {'error':>8} {'s':>7}"
    )
    for family in families.split(","):
        for s in SHAPES:
            print(row(family, s, dropout, recompute, chunked_loss), flush=True)


if __name__ == "__main__":
    main()
