"""Published training runs: one record a run, read from a JSON file.

The file holds {"rows": [...]}, each row a JSON object with the fields of `Run`; other fields are
left alone. A row that misses one, or has another kind of value there, is counted with the reason.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from pydantic import TypeAdapter, ValidationError

DEFAULT = Path(__file__).parent / "runs.json"
"""The runs that come with the project."""

WITH_MEMORY = Path(__file__).parent / "memory.json"
"""Runs whose peak memory was published, but no step time worth a comparison."""


@dataclass(frozen=True)
class Run:
    """One published run: a model, the machine, the plan, and the seconds of a step."""

    id: str
    dataset: str
    """The publication; a split by dataset keeps the runs of one together."""
    quality: str
    """A exact and complete, B minor unknowns, C significant unknowns, D headline only, M memory."""
    split: str
    arch: str
    """gpt, llama, gpt_sqrelu or mixtral."""
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    seq_len: int
    gpu: str
    num_gpus: int
    gpus_per_node: int
    tp: int
    pp: int
    dp: int
    cp: int
    ep: int
    micro_batch_size: int
    global_batch_size: int
    sequence_parallel: bool
    recompute: str
    zero_stage: int | str
    precision: str
    oom: bool = False
    iter_time_s: float | None = None
    """Seconds of a step."""
    vpp: int | None = None
    """Virtual stages per device."""
    nic_gbps_per_node: float | None = None
    """Line rate of a node's network, one direction, Gbit/s."""
    peak_mem_gib: float | None = None
    mem_kind: str | None = None
    """allocated, reserved, or as text."""
    attention: str = ""
    """"unfused" or "fused" where the run says so; else what its framework did."""
    framework: str = ""
    """Of the publication, with its version or year."""
    calc_model_tflops_per_gpu: float | None = None
    """Model TFLOP/s of one device by the one formula of all rows."""
    num_experts: int = 0
    """Of each layer; 0: dense."""
    experts_per_token: int = 0
    title: str = ""
    """What a reader calls the run."""

    @property
    def is_dense_step(self) -> bool:
        """Whether the run belongs to the summary: a dense model, quality A or B, with a time."""
        return self.quality in "AB" and self.iter_time_s is not None and self.ep == 1

    @property
    def num_microbatches(self) -> int:
        return self.global_batch_size // (self.dp * self.micro_batch_size)


@dataclass(frozen=True)
class RunFile:
    """What a file holds. incomplete: how many rows cannot be read, by reason."""

    runs: tuple[Run, ...]
    incomplete: Mapping[str, int]


def read_runs(path: Path) -> RunFile:
    """The runs of a file. Raises click.ClickException, one line, for a file that is none."""
    try:
        rows: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise click.ClickException(f'{path}: no runs ({error}); write {{"rows": [...]}}') from None
    adapter = TypeAdapter(Run)
    runs, incomplete = [], Counter[str]()
    for row in rows:
        try:
            runs.append(adapter.validate_python(row))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            incomplete[f"{where}: {first['msg']}"] += 1
    return RunFile(tuple(runs), incomplete)
