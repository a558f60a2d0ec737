"""A parameter's layout as a pin: kept exactly, and named where it cannot be."""

from functools import cache

import pytest
from support.models.hugging_face import BATCH, tiny_model

from meshfold.capture.pipeline import capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.errors import OptionError
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.options import CompileOptions, LayoutPin
from meshfold.ir.plan import Plan
from meshfold.ir.spmd import SpmdType
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.planner.find import find_plan_for
from meshfold.passes.region.pins import UnkeptPinError, pinned_slots
from meshfold.passes.region.typing import MeshSearch

PROBER = OpProber()
UP = "model.layers.*.mlp.up_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


@cache
def graph_of(family: str) -> FoldedGraph:
    model, batch = tiny_model(family)
    return capture(model, batch).graph


def pinned(pins: dict[str, int | str], family: str = "llama", **options: object) -> Plan:
    return find_plan_for(
        graph_of(family),
        resolve_cluster("local-cpu", 4),
        CompileOptions(pins=pins, **options),  # type: ignore[arg-type]
        model_name=family,
        batch_size=BATCH,
        probe=PROBER,
    )


def stored(found: Plan, end_of_name: str) -> list[dict[str, SpmdType]]:
    """Axis -> type, per region with such a parameter."""
    layouts = []
    for region in found.regions:
        for name, layout in zip(region.slot_names, region.typing.slots, strict=False):
            if name.endswith(end_of_name):
                layouts.append(dict(zip(found.mesh.names, layout, strict=True)))
    assert layouts
    return layouts


@pytest.mark.parametrize(
    ("name", "dim"), [("up_proj", 0), ("embed_tokens", 0), ("embed_tokens", 1)]
)
def test_a_shard_on_tp_is_kept(name: str, dim: int) -> None:
    pin = f"layout:*{name}.weight"
    found = pinned({"dp": 2, "tp": 2, pin: f"tp:{dim}"})
    layouts = stored(found, f"{name}.weight")
    assert all(x["tp"].is_shard and x["tp"].dim == dim for x in layouts)
    assert found.pins[pin] == f"tp:{dim}"


def test_a_shard_on_dp_is_kept_though_others_stay_unsharded() -> None:
    free = pinned({"dp": 4})
    assert not any(x["dp"].is_shard for x in stored(free, "embed_tokens.weight"))
    found = pinned({"dp": 4, f"layout:{EMBEDDING}": "dp"})
    assert all(x["dp"].is_shard for x in stored(found, "embed_tokens.weight"))
    assert found.time.step_s >= free.time.step_s


def test_replicated_is_kept_under_zero3_and_tp() -> None:
    for pins in ({"dp": 4, "zero": 3}, {"dp": 2, "tp": 2, "zero": 3}):
        everything = pinned(dict(pins))
        assert any(t.is_shard for x in stored(everything, "up_proj.weight") for t in x.values())
        found = pinned({**pins, f"layout:{UP}": "replicate"})
        assert not any(t.is_shard for x in stored(found, "up_proj.weight") for t in x.values())
        assert any(t.is_shard for x in stored(found, "down_proj.weight") for t in x.values())


def test_what_the_user_wants_unsharded_is_not_called_indivisible() -> None:
    found = pinned({"dp": 4, "zero": 3, f"layout:{UP}": "replicate"})
    assert found.strategy.zero == 3
    assert not any("no dim divides" in note for note in found.notes)


def test_a_shard_on_tp_is_not_kept_where_tp_shards_the_batch() -> None:
    cluster = resolve_cluster("local-cpu", 4)
    graph = graph_of("llama")
    slots = pinned_slots(graph, (LayoutPin(UP, "tp:0"),))
    search = MeshSearch(graph, cluster, build_mesh(cluster, 2, 2), BATCH, pinned=slots)
    assert search.solve(zero=0).sharded_fraction > 0
    with pytest.raises(UnkeptPinError):
        search.solve(zero=0, mode="data")


def test_both_axes_at_once() -> None:
    found = pinned({"dp": 2, "tp": 2, f"layout:{UP}": "tp:0,dp"})
    for layout in stored(found, "up_proj.weight"):
        assert layout["tp"].dim == 0 and layout["dp"].is_shard


def test_a_tied_parameter_is_pinned_wherever_it_is_read() -> None:
    found = pinned({"dp": 4, "layout:*wte.weight": "dp"}, family="gpt2")
    assert all(x["dp"].is_shard for x in stored(found, "wte.weight"))


def test_only_meshes_that_can_keep_it_are_searched() -> None:
    found = pinned({f"layout:{UP}": "tp:0"})
    assert "tp" in found.mesh.names
    assert found.search.pruned["pinned layout cannot be kept"] > 0


def test_baselines_keep_no_pinned_layout() -> None:
    rows = {c.name: c for c in pinned({"dp": 4, f"layout:{EMBEDDING}": "dp"}).baselines}
    free = {c.name: c for c in pinned({"dp": 4}).baselines}
    assert rows["DDP"] == free["DDP"]


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"layout:nothing.weight": "dp"}, "pin layout:nothing.weight=dp: no parameter is called"),
        (
            {"layout:model.layers.0.mlp.up_proj.weight": "dp"},
            r"model.layers.1.mlp.up_proj.weight is stored alike.*use a pattern for all 2",
        ),
        (
            {f"layout:{UP}": "dp", "layout:*up_proj.weight": "replicate"},
            r"pin layout:\*up_proj.weight=replicate: pin layout:.*=dp says otherwise",
        ),
        ({"tp": 1, f"layout:{UP}": "tp:0"}, r"pin layout:.*=tp:0: no mesh of 4 devices"),
        ({"tp": 2, "sp": 0, f"layout:{UP}": "tp:1"}, r"pin layout:.*=tp:1: no mesh of 4 devices"),
        ({f"layout:{UP}": "tp:7"}, r"pin layout:.*=tp:7: no mesh of 4 devices"),
        ({"zero": 0, f"layout:{UP}": "dp"}, r"pin layout:.*=dp: no mesh of 4 devices"),
        ({f"layout:{UP}": "rows"}, r"write replicate, dp, tp:DIM, tp:DIM\+ or either with ,dp"),
    ],
)
def test_a_pin_that_cannot_be_kept_names_itself(pins: dict[str, int | str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        pinned(pins)


def test_not_in_a_pipeline() -> None:
    with pytest.raises(OptionError, match="layouts cannot be pinned in a pipeline yet"):
        pinned({"pp": 2, f"layout:{UP}": "dp"})
