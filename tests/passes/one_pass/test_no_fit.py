"""What is said where no program in one pass fits."""

import pytest
from support.models.hugging_face import BATCH, tiny_model

from meshfold.capture.pipeline import capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.ir.options import CompileOptions
from meshfold.ir.strategy import Degrees
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.one_pass.no_fit import NoMeshFits
from meshfold.passes.one_pass.search import MeshPlanner
from meshfold.passes.one_pass.tree import strategies_on
from meshfold.passes.region.typing import MeshSearch
from meshfold.units import bytes_text

BUDGET = 50_000


def planner(dp: int, tp: int) -> MeshPlanner:
    model, batch = tiny_model("gpt2")
    folded, cluster = capture(model, batch).graph, resolve_cluster("dgx-v100", 4)
    search = MeshSearch(folded, cluster, build_mesh(cluster, dp, tp), BATCH)
    strategies = [s for s in strategies_on(Degrees(dp=dp, tp=tp)) if s.offload == "none"]
    options = CompileOptions(memory_bytes=BUDGET)
    return MeshPlanner(folded, cluster, search, strategies, options, OpProber())


@pytest.mark.parametrize(
    ("is_proven", "words"), [(True, "nothing fits"), (False, "found nothing that fits")]
)
def test_that_nothing_fits_is_said_where_a_bound_proves_it(is_proven: bool, words: str) -> None:
    of = planner(2, 2)
    smallest, found = of.smallest, NoMeshFits((of,), is_proven)
    told = found.error(4, explains=True)
    assert str(told).startswith(f"{words} in 50.0 kB per device on 4 devices: the best candidate, ")
    assert f"needs {bytes_text(smallest.memory.peak)}, most of it reserve" in str(told)
    assert (told.required_bytes, told.available_bytes) == (smallest.memory.peak, BUDGET)
    short = found.error(4, explains=False)
    assert str(short) == f"{words} in 50.0 kB per device on 4 devices"
    assert (short.binding_constraint, short.available_bytes) == ("memory", BUDGET)


def test_what_two_searches_do_not_find() -> None:
    two, four = planner(2, 2), planner(4, 1)
    both = NoMeshFits((two,), is_proven=True).and_in(NoMeshFits((four,), is_proven=False))
    assert both.words == "found nothing that fits"
    least = min(two.smallest.memory.peak, four.smallest.memory.peak)
    assert both.error(4, explains=True).required_bytes == least
