"""Rows that a mask puts among others: captured as ops that ranks share, with equal numbers."""

from functools import cache

import pytest
import torch
from support.programs.local_programs import errors_of_a_step
from torch import Tensor, nn

from meshfold.capture.pipeline import Captured, capture
from meshfold.capture.rewrites.masked_scatter import SCATTER
from meshfold.codegen.emit.region import emit_typed
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.ir.strategy import Degrees
from meshfold.passes.region.typing import MeshSearch
from meshfold.validation.float64_mode import float64_everywhere

BATCH, TOKENS, WIDTH, IMAGES, PATCHES = 8, 12, 16, 8, 4
IMAGE = 0


class Multimodal(nn.Module):
    """Features of patches take the places of their tokens, as in LLaVA."""

    def __init__(self, spelling: str = "expand") -> None:
        super().__init__()
        self.spelling = spelling
        self.vision = nn.Linear(WIDTH, WIDTH)
        self.embed = nn.Embedding(20, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, pixels: Tensor, ids: Tensor) -> Tensor:
        features = torch.tanh(self.vision(pixels))
        x = self.embed(ids)
        mask = (ids == IMAGE).unsqueeze(-1)
        if self.spelling == "expand":
            mask = mask.expand_as(x)
        if self.spelling == "own":
            mask = mask & (self.embed.weight[0].detach() > -9.0)
        rows = features.reshape(-1, WIDTH) if self.spelling == "flat" else features
        return (self.layer(x.masked_scatter(mask, rows)) ** 2).mean()


def batch_of() -> dict[str, Tensor]:
    """As many patches as tokens of images, in rows unevenly: 4 in each row but the first two."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 20, (BATCH, TOKENS), generator=generator)
    for row in range(BATCH):
        count = {0: 2 * PATCHES, 1: 0}.get(row, PATCHES)
        ids[row, torch.randperm(TOKENS, generator=generator)[:count]] = IMAGE
    pixels = torch.randn(IMAGES, PATCHES, WIDTH, generator=generator, dtype=torch.float64)
    return {"pixels": pixels, "ids": ids}


@cache
def captured(spelling: str) -> tuple[nn.Module, dict[str, Tensor], Captured]:
    torch.manual_seed(0)
    model, batch = Multimodal(spelling).double(), batch_of()
    with float64_everywhere():
        return model, batch, capture(model, batch)


def targets(found: Captured) -> set[str]:
    return {op.target for region in found.graph.regions for op in region.graph.ops}


@pytest.mark.parametrize("spelling", ["expand", "broadcast", "flat"])
def test_a_mask_of_rows_is_found(spelling: str) -> None:
    made = targets(captured(spelling)[2])
    assert SCATTER not in made and "aten.index_select.default" in made


def test_a_mask_of_single_entries_is_left_alone() -> None:
    model, batch, found = captured("own")
    assert SCATTER in targets(found)


@pytest.mark.parametrize(
    ("degrees", "zero"),
    [(Degrees(dp=4), 0), (Degrees(dp=2, tp=2), 3), (Degrees(tp=4), 0), (Degrees(cp=2, tp=2), 0)],
    ids=str,
)
@pytest.mark.parametrize("spelling", ["expand", "flat", "own"])
def test_every_gradient_is_that_of_one_process(spelling: str, degrees: Degrees, zero: int) -> None:
    model, batch, found = captured(spelling)
    cluster = resolve_cluster("local-cpu", 4)
    mesh = build_mesh(cluster, degrees.dp, degrees.tp, cp=degrees.cp)
    search = MeshSearch(found.graph, cluster, mesh, BATCH)
    typed = search.solve(zero=zero)
    program = emit_typed(found.graph, typed.typings, search.costs)
    for errors in errors_of_a_step(model, batch, found, program):
        worst = max(errors, key=errors.__getitem__)
        assert errors[worst] <= 1e-12, worst


def test_on_dp_neither_tokens_nor_features_are_gathered() -> None:
    found = captured("expand")[2]
    cluster = resolve_cluster("dgx-h100", 4)
    search = MeshSearch(found.graph, cluster, build_mesh(cluster, 4, 1), BATCH)
    (price,) = search.solve(zero=0).prices
    gathered = [c.value for c in price.conversions if "all_gather" in c.forward]
    assert gathered == []


def test_more_places_than_rows_are_an_error() -> None:
    model, batch, found = captured("expand")
    cluster = resolve_cluster("local-cpu", 2)
    mesh = build_mesh(cluster, 2, 1)
    search = MeshSearch(found.graph, cluster, mesh, BATCH)
    program = emit_typed(found.graph, search.solve(zero=0).typings, search.costs)
    short = {**batch, "ids": torch.full_like(batch["ids"], IMAGE)}
    with pytest.raises(IndexError):
        errors_of_a_step(model, short, found, program, (torch.zeros(()), {}))
