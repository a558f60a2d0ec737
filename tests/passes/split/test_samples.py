"""Which dim of a value is the batch does not depend on what is slow, nor on the precision."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models.hugging_face import BATCH, families, tiny_model
from torch import Tensor, nn
from torch.nn import functional

from meshfold.capture.pipeline import capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.limits import MOST_DEVICES
from meshfold.ir.op_graph import FoldedGraph
from meshfold.passes.graph.without_dropout import exact
from meshfold.passes.split.microbatch import MicrobatchGraphs
from meshfold.passes.split.samples import follow_samples

WIDTH = 8


class Packed(nn.Module):
    """All images are one sequence, as NaViT packs them, until rows of their own attend to it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
            for _ in range(2)
        )
        self.queries = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        packed = torch.cat([x[0], x[1], x[2], x[3]])[None]
        for layer in self.layers:
            packed = layer(packed) + packed
        queries = self.queries[None, None].expand(1, BATCH, WIDTH)
        rows = functional.scaled_dot_product_attention(queries, packed, packed) + queries
        return functional.cross_entropy(rows.reshape(BATCH, WIDTH), labels)


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().sum()


@cache
def graph_of(name: str) -> FoldedGraph:
    if name != "packed":
        return capture(*tiny_model(name)).graph
    labels = torch.randint(0, WIDTH, (BATCH,))
    return capture(Packed(), {"x": torch.randn(BATCH, 16, WIDTH), "labels": labels}).graph


def on_devices_that_take(compute: float, memory: float) -> ClusterSpec:
    """Four processes of this machine that take so many times as long: what is tiny here takes there
    what a real model takes."""
    cluster = resolve_cluster("local-cpu", BATCH)
    (group,) = cluster.groups
    peaks = {dtype: peak / compute for dtype, peak in group.device.peak_flops_per_s.items()}
    rate = group.device.memory_bytes_per_s / memory
    device = replace(group.device, peak_flops_per_s=peaks, memory_bytes_per_s=rate)
    return replace(cluster, groups=(replace(group, device=device),))


@pytest.mark.parametrize("name", ["packed", *families("gpt2", without=("llama", "bert", "vit"))])
@given(compute=st.floats(1e-3, 1e6), memory=st.floats(1e-3, 1e6))
@settings(max_examples=5)
def test_what_is_slow_has_no_say(name: str, compute: float, memory: float) -> None:
    folded = graph_of(name)
    usual = MicrobatchGraphs(folded, resolve_cluster("local-cpu", BATCH), BATCH)
    assert not usual.refusal
    assert not MicrobatchGraphs(folded, on_devices_that_take(compute, memory), BATCH).refusal


@pytest.mark.parametrize("name", ["packed", *families("gpt2", without=("llama", "bert", "vit"))])
def test_a_program_has_the_same_types_in_every_precision(name: str) -> None:
    folded = graph_of(name)
    cluster = resolve_cluster("local-cpu", BATCH)
    found, wide = (follow_samples(g, cluster, BATCH, sums=True) for g in (folded, exact(folded)))
    assert found.typings == wide.typings


@pytest.mark.parametrize("size", [2 * MOST_DEVICES, 3 * 65_537, 262_147])
def test_more_samples_than_a_mesh_has_ranks_are_followed_in_parts(size: int) -> None:
    """262,147 is a prime, whose samples are one part."""
    x = torch.empty(size, WIDTH, device="meta")
    folded = capture(Squares(), {"x": x}).graph
    cluster = resolve_cluster("local-cpu", 2)
    followed = follow_samples(folded, cluster, size, sums=True)
    (typing,) = followed.typings
    assert typing.ops[0].inputs[0][0].is_shard == (size != 262_147)
