"""Trains a small Llama under a plan that meshfold finds. Runs alone, or on as many processes as
torchrun starts:

    python examples/train.py
    torchrun --nproc-per-node 4 examples/train.py --steps 50
"""

import argparse
import os

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import meshfold

BATCH, SEQUENCE, VOCABULARY = 8, 64, 256


def build_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=SEQUENCE,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def make_batch(step: int) -> dict[str, torch.Tensor]:
    """Counting sequences with random starts: the same global batch on every rank."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(0, VOCABULARY, (BATCH, 1), generator=generator)
    tokens = (start + torch.arange(SEQUENCE)) % VOCABULARY
    return {"input_ids": tokens, "labels": tokens}


def train(model: torch.nn.Module, steps: int) -> list[float]:
    """An ordinary loop; nothing in it knows about meshfold."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        loss = model(**make_batch(step))
        loss = getattr(loss, "loss", loss)  # a Hugging Face model returns a record
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--plan", help="a plan file instead of a search")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:  # set by torchrun
        dist.init_process_group("gloo")
    num_devices = int(os.environ.get("WORLD_SIZE", "1"))
    cluster = f"local-cpux{num_devices}"
    options = meshfold.CompileOptions(pins={"microbatches": 1})  # what a plain loop trains
    model = meshfold.compile(
        build_model(), cluster, make_batch(0), plan=arguments.plan, options=options
    )
    losses = train(model, arguments.steps)
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"{model.plan.strategy.label}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
