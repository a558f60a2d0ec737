"""What a change of mode costs between neighbours, against the exact price of full programs."""

import itertools
from functools import cache

import numpy as np
import pytest
import torch
from support.models.stacks import UNet
from support.models.vision import images, small_resnet

from meshfold.capture.pipeline import capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.ir.op_graph import FoldedGraph
from meshfold.passes.one_pass.mode_changes import ModeChanges, Typings, mode_changes, passes_on
from meshfold.passes.price.step import boundary_s
from meshfold.passes.region.typing import MeshSearch

BATCH = 4


@cache
def resnet() -> FoldedGraph:
    return capture(small_resnet((3,)), images(BATCH, 16, 8)).graph


@cache
def search_on(dp: int, tp: int) -> MeshSearch:
    cluster = resolve_cluster("local-cpu", dp * tp)
    return MeshSearch(resnet(), cluster, build_mesh(cluster, dp, tp), BATCH)


def typings_of(search: MeshSearch) -> Typings:
    return {
        "tensor": search.solve(zero=0).typings,
        "sequence": search.solve(zero=0, mode="sequence").typings,
        "data": search.solve(zero=0, mode="data").typings,
    }


def changes_on(search: MeshSearch) -> ModeChanges:
    return mode_changes(search.folded, typings_of(search), search.costs)


@pytest.mark.parametrize("degrees", [(2, 2), (1, 4)], ids=str)
def test_boundary_costs_add_up_to_those_of_the_program(degrees: tuple[int, int]) -> None:
    search = search_on(*degrees)
    changes, typings = changes_on(search), typings_of(search)
    assert changes.modes == ("tensor", "sequence", "data") and changes.by_region
    folded = search.folded
    totals = set()
    for choice in itertools.product(changes.modes, repeat=len(folded.regions)):
        mixed = [typings[mode][r] for r, mode in enumerate(choice)]
        layouts = [changes.layout(i.region, choice[i.region]) for i in folded.instances]
        total_s = sum(changes.table_s[a, b] for a, b in itertools.pairwise(layouts))
        assert total_s == pytest.approx(boundary_s(folded, mixed, search.costs), abs=1e-15)
        totals.add(round(total_s, 12))
    assert len(totals) > 2


def test_pairs_that_never_meet_are_no_detour() -> None:
    changes = changes_on(search_on(2, 2))
    first, last = changes.layout(0, "data"), changes.layout(len(resnet().regions) - 1, "tensor")
    met = changes.table_s[changes.table_s < changes.table_s.max()]
    assert changes.table_s[last, first] == changes.table_s.max() > met.max()
    assert np.all(np.diag(changes.table_s) == 0)


def test_without_the_batch_on_tp_modes_alone_are_told_apart() -> None:
    search = search_on(2, 2)
    typings = typings_of(search)
    two: Typings = {mode: typings[mode] for mode in ("sequence", "tensor")}
    changes = mode_changes(search.folded, two, search.costs)
    assert (changes.modes, changes.by_region) == (("tensor", "sequence"), False)
    assert changes.table_s[0, 1] == changes.table_s[1, 0] > 0
    assert {changes.layout(r, "sequence") for r in range(len(resnet().regions))} == {1}


def test_a_value_that_goes_further_is_seen() -> None:
    assert passes_on(resnet())
    assert not passes_on(capture(UNet(), {"x": torch.randn(4, 4)}).graph)
