"""CPU time of the region search on six families, per region, on one and on two axes.

    python benchmarks/search.py [--families gpt2,llama]

Models of real size on the meta device. One axis: tp8 with sequence parallelism. Two axes: dp8 x tp8
on 8 nodes, first with the dp axis decided by following the batch (what planning does), then jointly
over both axes. Columns: variables, largest domain, induced width, largest table (entries),
milliseconds to build the tables and to solve once, both without what regions of one mesh share.
"""

import time
from collections.abc import Callable
from typing import Any

import click
import torch
import transformers
from torch import nn

from meshfold.capture.pipeline import capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.ir.op_graph import FoldedGraph
from meshfold.passes.region.parameter_tables import Prices
from meshfold.passes.region.typing import MeshSearch

LAYERS = 3
BATCH = 64
SEQUENCE = 512


def _text(model: type[nn.Module], config: Any) -> tuple[nn.Module, dict[str, Any]]:
    tokens = torch.zeros((BATCH, SEQUENCE), dtype=torch.long)
    return model(config), {"input_ids": tokens, "labels": tokens.clone()}


def _gpt2() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.GPT2Config(n_layer=LAYERS, n_embd=1600, n_head=32, use_cache=False)
    return _text(transformers.GPT2LMHeadModel, config)


def _llama() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.LlamaConfig(
        num_hidden_layers=LAYERS, num_key_value_heads=8, use_cache=False
    )
    return _text(transformers.LlamaForCausalLM, config)


def _bert() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.BertConfig(
        num_hidden_layers=LAYERS, hidden_size=1024, num_attention_heads=16, intermediate_size=4096
    )
    return _text(transformers.BertForMaskedLM, config)


def _t5() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.T5Config(
        num_layers=LAYERS,
        d_model=1024,
        d_kv=64,
        d_ff=4096,
        num_heads=16,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return _text(transformers.T5ForConditionalGeneration, config)


def _mixtral() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.MixtralConfig(num_hidden_layers=LAYERS, use_cache=False)
    return _text(transformers.MixtralForCausalLM, config)


def _vit() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.ViTConfig(
        num_hidden_layers=LAYERS, hidden_size=1024, num_attention_heads=16, intermediate_size=4096
    )
    batch = {
        "pixel_values": torch.zeros(BATCH, 3, 224, 224),
        "labels": torch.zeros(BATCH, dtype=torch.long),
    }
    return transformers.ViTForImageClassification(config), batch


FAMILIES: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "bert": _bert,
    "t5": _t5,
    "vit": _vit,
    "mixtral": _mixtral,
}


def measure(search: MeshSearch, region: int, joint: bool) -> str:
    """One row for one region."""
    start = time.process_time()
    problem = search.problem(region, "sequence", joint=joint)
    built = time.process_time()
    (optimum,) = problem.optima([Prices(used_s_per_byte=1e-10)])
    assert optimum is not None
    optimum.solution()
    solved = time.process_time()
    domains, found = problem.factors.domains, optimum.found
    return (
        f"{len(domains):5d} {max(domains, default=1):6d} {found.width:5d} "
        f"{found.largest_table:9d} {(built - start) * 1e3:8.1f} {(solved - built) * 1e3:8.1f}"
    )


def rows(name: str, graph: FoldedGraph) -> None:
    cluster = resolve_cluster("dgx-h100x8")
    cases = (("tp8", 1, False), ("dp8 x tp8", 8, False), ("dp8 x tp8 joint", 8, True))
    for title, dp, joint in cases:
        start = time.process_time()
        search = MeshSearch(graph, cluster, build_mesh(cluster, dp, 8), BATCH)
        shared_ms = (time.process_time() - start) * 1e3
        for number, region in enumerate(graph.regions):
            figures = measure(search, number, joint)
            head = f"{name:8} {region.name} {len(region.graph.ops):4d} ops  {title:16}"
            print(f"{head} {figures}  rules and batch {shared_ms:.0f} ms")


@click.command()
@click.option("--families", default=",".join(FAMILIES), help="Comma-separated families.")
def main(families: str) -> None:
    torch.set_num_threads(1)
    print(f"{'':42} vars domain width     table build ms solve ms")
    for name in families.split(","):
        with torch.device("meta"):
            model, batch = FAMILIES[name]()
        rows(name, capture(model, batch).graph)


if __name__ == "__main__":
    main()
