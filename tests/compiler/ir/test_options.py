"""Options: the surface is frozen, and every wrong value gets one clear line."""

import dataclasses
from typing import get_args

import pytest

from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.errors import OptionError
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.options import PINS, CompileOptions, Precision


def test_the_option_surface_is_frozen() -> None:
    """A new option needs a measured reason and a line here."""
    assert [f.name for f in dataclasses.fields(CompileOptions)] == [
        "memory_bytes",
        "pins",
        "optimizer",
        "full_capture",
        "seed",
        "precision",
        "value_checks",
        "fixed_inputs",
        "mode",
        "allow_offload",
        "allow_low_precision_states",
        "custom_rules",
        "keep_checkpointing",
        "without_rules",
        "loss",
        "outputs",
        "sharded_outputs",
    ]
    assert tuple(PINS) == (
        "dp",
        "ep",
        "cp",
        "tp",
        "zero",
        "dp_shard",
        "sp",
        "recompute",
        "offload",
        "pp",
        "microbatches",
        "schedule",
        "virtual_stages",
        "batch_norm",
        "micro_chunks",
        "chained_chunks",
        "collective_matmul",
        "chunked_loss",
        "states",
        "slices",
        "reduce_bucket_bytes",
        "allgather_bucket_bytes",
        "hierarchical_all_reduce",
    )


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"pins": {"xp": 2}},
            "pin 'xp' is unknown; pins are dp, ep, cp, tp, zero, dp_shard, sp, recompute, "
            "offload, pp, microbatches, schedule, virtual_stages",
        ),
        ({"pins": {"batch_norm": "batch"}}, "pin batch_norm=batch: unknown; write microbatch"),
        ({"pins": {"pp": 0}}, "pin pp=0: no degree; write 1 or more"),
        ({"pins": {"dp_shard": 0}}, "pin dp_shard=0: no degree; write 1 or more"),
        ({"pins": {"cp": 0}}, "pin cp=0: no degree; write 1 or more"),
        ({"pins": {"ep": 0}}, "pin ep=0: no degree; write 1 or more"),
        ({"pins": {"chunked_loss": 2}}, "pin chunked_loss=2: unknown; write chunked_loss=1 or"),
        ({"pins": {"slices": 0}}, "pin slices=0: no degree; write 1 or more"),
        ({"pins": {"tp": 0}}, "pin tp=0: no degree; write 1 or more"),
        ({"pins": {"zero": 4}}, "pin zero=4: no ZeRO level; write 0, 1, 2 or 3"),
        ({"pins": {"tp": "two"}}, "pin tp=two: no number; write one"),
        (
            {"pins": {"recompute": "some"}},
            "pin recompute=some: unknown; write none or light or selective or heavy or full",
        ),
        (
            {"pins": {"offload": "all"}},
            "pin offload=all: unknown; write none or optimizer or parameters or disk or a",
        ),
        (
            {"pins": {"schedule": "dual"}},
            "pin schedule=dual: unknown; write gpipe or 1f1b or interleaved or zero_bubble",
        ),
        ({"pins": {"parts": 2}}, "pin 'parts' is now 'micro_chunks'; write --pin micro_chunks=2"),
        ({"pins": {"ring": 1}}, "pin 'ring' is now 'collective_matmul'; write --pin coll"),
        ({"pins": {"virtual_stages": 0}}, "pin virtual_stages=0: no degree; write 1 or more"),
        (
            {"pins": {"reduce_bucket_bytes": 25}},
            "pin reduce_bucket_bytes=25: no size; write one, as 25MB, or 0 for none at all",
        ),
        ({"pins": {"reduce_bucket_bytes": "much"}}, "pin reduce_bucket_bytes=much: no size; write"),
        ({"pins": {"sp": 2}}, "pin sp=2: unknown; write sp=1 or sp=0"),
        ({"memory_bytes": 0}, "memory: 0 bytes; write more than 0"),
        ({"optimizer": "lion"}, "optimizer 'lion' is unknown; write adamw, .*, momentum or sgd"),
    ],
)
def test_wrong_values_are_named(kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        CompileOptions(**kwargs)  # type: ignore[arg-type]


def test_options_do_not_change_with_the_callers_dict() -> None:
    pins = {"tp": 2}
    options = CompileOptions(pins=pins)
    pins["tp"] = 4
    assert options.pins == {"tp": 2}


def test_sizes_of_coalesced_reductions_are_read() -> None:
    found = [
        CompileOptions(pins=pins).reduce_bucket_pin
        for pins in ({}, {"reduce_bucket_bytes": 0}, {"reduce_bucket_bytes": "25 MB"})
    ]
    assert found == [None, 0, 25_000_000]
    assert CompileOptions(pins={"reduce_bucket_bytes": 0, "tp": 2}).strategy_pins == {"tp": 2}


@pytest.mark.parametrize(
    ("cluster", "precision"),
    [
        ("dgx-h100x2", "bf16"),
        ("dgx-a100-40", "bf16"),
        ("a10g", "bf16"),  # 70 TFLOP/s over 31
        ("dgx-v100", "model"),  # no bfloat16
        ("local-cpux4", "model"),  # slower in it
    ],
)
def test_auto_is_bf16_where_devices_are_fast_in_it(cluster: str, precision: Precision) -> None:
    spec = resolve_cluster(cluster)
    assert CompileOptions().precision_on(spec) == precision
    for asked in get_args(Precision):
        assert CompileOptions(precision=asked).precision_on(spec) == asked


def test_one_slow_device_keeps_auto_from_bf16() -> None:
    fast, slow = (resolve_cluster(name) for name in ("dgx-h100", "dgx-v100"))
    mixed = ClusterSpec("mixed", (*fast.groups, *slow.groups), fast.network)
    assert CompileOptions().precision_on(mixed) == "model"


def test_an_auto_that_nobody_resolved_left_the_graph_as_it_was() -> None:
    assert CompileOptions().captured_precision == "model"
    assert CompileOptions(precision="fp16").captured_precision == "fp16"


def test_modes_that_a_program_may_run_in() -> None:
    assert CompileOptions().modes == ("eager", "scheduled")
    assert CompileOptions(mode="eager").modes == ("eager",)
    assert CompileOptions(mode="scheduled").modes == ("scheduled",)
    assert CompileOptions(pins={"micro_chunks": 2}).modes == ("scheduled",)
    assert CompileOptions(pins={"micro_chunks": 1}).modes == ("eager", "scheduled")
    with pytest.raises(OptionError, match="micro_chunks=2.*leave --mode eager out"):
        CompileOptions(mode="eager", pins={"micro_chunks": 2})
