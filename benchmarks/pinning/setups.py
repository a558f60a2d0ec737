"""Models on clusters that pins are drawn for."""

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from meshfold.capture.pipeline import capture
from meshfold.cost_models.hardware.devices import cluster as preset
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.options import CompileOptions, Mode
from meshfold.models.config_file import Configuration
from meshfold.models.from_argument import build_model
from meshfold.units import bytes_text

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"


@dataclass(frozen=True)
class PinSetup:
    """A model, a cluster and a global batch, all that a plan is asked for but pins."""

    model: str
    """Name of a configuration in examples/configs."""
    cluster: str
    batch: int
    sequence: int
    mode: Mode = "eager"
    memory_bytes: int | None = None
    """Of a device; None: what it has."""

    @property
    def name(self) -> str:
        scheduled = ", scheduled" * (self.mode != "eager")
        limit = f", {bytes_text(self.memory_bytes)}" if self.memory_bytes else ""
        return f"{self.model} on {self.cluster}{limit}{scheduled}"

    @property
    def is_moe(self) -> bool:
        return self.model.startswith("mixtral")

    @property
    def num_devices(self) -> int:
        return preset(self.cluster).num_devices

    def captured(self) -> tuple[FoldedGraph, ClusterSpec, CompileOptions]:
        """The folded graph, the cluster, and the options without pins."""
        cluster = preset(self.cluster)
        options = CompileOptions(mode=self.mode, memory_bytes=self.memory_bytes)
        precision = options.precision_on(cluster)
        graph = _graph(self.model, self.batch, self.sequence, precision)
        return graph, cluster, replace(options, precision=precision)


@lru_cache(maxsize=2)
def _graph(model: str, batch: int, sequence: int, precision: str) -> FoldedGraph:
    fields = json.loads((CONFIGS / f"{model}.json").read_text())
    built = build_model(
        Configuration(Path(f"{model}.json"), fields), batch=batch, sequence=sequence or None
    )
    return capture(built.model, built.example_inputs, precision=precision).graph


_EAGER = tuple(
    PinSetup(model, cluster, batch, sequence)
    for model, batch, sequence, clusters in (
        ("gpt2", 64, 1024, ("dgx-v100x2", "a10gx8")),
        ("bert-large", 64, 512, ("rtx-4090x2", "dgx-a100-40x4")),
        ("vit-huge", 256, 0, ("a100-pcie-40x2", "dgx-h100x4")),
        ("t5-large", 64, 512, ("dgx-a100-40x2", "l4x4")),
        ("llama-3-8b", 64, 2048, ("dgx-h100x8", "a100-pcie-80x4")),
        ("mixtral-8x7b", 64, 2048, ("dgx-h100x4", "dgx-a100-80x8")),
    )
    for cluster in clusters
)
_TIGHT = tuple(
    PinSetup("llama-3-8b", "dgx-h100x1", batch, 2048, memory_bytes=gigabytes * 10**9)
    for batch, gigabytes in ((8, 24), (8, 18), (64, 26), (64, 16))
)
SETUPS = (
    *_EAGER,
    *(replace(s, mode="scheduled") for s in _EAGER if s.cluster.endswith("x2")),
    *_TIGHT,
)
"""Twelve, four of them in mode scheduled, and four with so little memory that what is kept decides.
"""
