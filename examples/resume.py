"""Trains a small GPT-2 in pipeline stages and saves after every step. Whatever stops it, started
again it goes on where it was, and torchrun starts it again by itself:

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nproc-per-node 2 --max-restarts 3 examples/resume.py --folder checkpoint
    torchrun --nproc-per-node 2 --max-restarts 3 examples/resume.py --folder other --lose-at 3

--lose-at ends the last process in the middle of that step, the first time: the others stop and say
which stage and action they waited for, all start again and load the last checkpoint. The variable
is torchrun's: without it restarted processes share a store with those before them, where gloo
finds the addresses of processes that are gone.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

import meshfold

BATCH, SEQUENCE, VOCABULARY = 8, 32, 128


def build_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=SEQUENCE, n_embd=32, n_layer=4, n_head=4)
    )


def make_batch(step: int) -> dict[str, torch.Tensor]:
    """Counting sequences with random starts: the same global batch on every rank."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(0, VOCABULARY, (BATCH, 1), generator=generator)
    tokens = (start + torch.arange(SEQUENCE)) % VOCABULARY
    return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="of the checkpoint")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--lose-at", type=int, help="end the last process in this step, once")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    options = meshfold.CompileOptions(pins={"pp": num_ranks, "microbatches": 4})
    model = meshfold.compile(
        build_model(), f"local-cpux{num_ranks}", make_batch(0), options=options
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = 0
    if arguments.folder.exists():
        first = meshfold.load_checkpoint(arguments.folder, model, optimizer)["step"]
    is_first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    for step in range(first, arguments.steps):
        if is_first_life and step == arguments.lose_at and rank == num_ranks - 1:
            os._exit(3)
        loss = model.train_step(make_batch(step), timeout_s=60.0)
        optimizer.step()
        optimizer.zero_grad()
        meshfold.save_checkpoint(arguments.folder, model, optimizer, extra={"step": step + 1})
        if rank == 0:
            print(f"step {step}: loss {loss:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
