"""Optimizer states in the host's memory change where numbers are, and none of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes.offload import (
    Compared,
    Saved,
    activations_compared,
    checkpointed,
    compared,
    started,
)
from support.processes.pool import Pools

from meshfold.errors import MeshfoldError

POOLED = "support.processes.offload"


@pytest.mark.parametrize(
    ("pins", "options"),
    [({}, {}), ({"microbatches": 2}, {}), ({"recompute": "full"}, {"mode": "scheduled"})],
)
def test_one_device_trains_as_without(pins: dict[str, Any], options: dict[str, Any]) -> None:
    found = compared(pins, **options)
    assert found.differ == [] and found.num_offloaded == 16
    assert found.device_bytes == found.stored_bytes


@pytest.mark.parametrize(
    ("pins", "family", "options"),
    [
        ({}, "gpt2", {}),
        ({"recompute": "full"}, "llama", {}),
        ({}, "mixtral", {}),
        ({"recompute": "selective"}, "gpt2", {"mode": "scheduled"}),
        ({"microbatches": 2}, "dropout", {}),
        ({}, "dropout", {"precision": "bf16"}),
        ({"recompute": "full", "microbatches": 2}, "stack", {"precision": "bf16"}),
        ({"recompute": "full"}, "stack", {"mode": "scheduled", "precision": "bf16"}),
    ],
    ids=str,
)
def test_parameters_that_come_by_layer_train_as_without(
    pins: dict[str, Any], family: str, options: dict[str, Any]
) -> None:
    """Of GPT-2 the tied embedding stays."""
    found = compared(pins, family, "parameters", **options)
    assert found.differ == [] and found.num_offloaded > 0
    assert (found.device_bytes > 0) == (family == "gpt2")


def test_a_changed_parameter_is_not_read_again() -> None:
    run = started({"offload": "parameters"})
    loss = run.model(**run.batch)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.add_(1.0)
    with pytest.raises(MeshfoldError, match="was changed between forward and backward"):
        loss.backward()


def test_evaluation_between_forward_and_backward_takes_no_parameters_away() -> None:
    (run, right) = (started({"offload": offload}) for offload in ("parameters", "none"))
    losses = [x.model(**x.batch) for x in (run, right)]
    with torch.no_grad():
        assert torch.equal(*(x.model(**x.batch) for x in (run, right)))
    for x, loss in zip((run, right), losses, strict=True):
        (loss + x.model(**x.batch)).backward()
    for a, b in zip(run.model.parameters(), right.model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_masters_are_on_the_host_alone() -> None:
    found = compared({}, precision="bf16")
    assert found.differ == [] and 2 * found.device_bytes == found.stored_bytes


def test_tied_parameters_are_updated_once() -> None:
    assert compared({}, "gpt2").differ == []


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "pins"),
    [
        (2, {"dp": 2, "zero": 0}),
        (2, {"dp": 2, "zero": 1, "microbatches": 2}),
        (2, {"dp": 2, "zero": 2}),
        (2, {"dp": 2, "zero": 3}),
        (2, {"dp": 2, "zero": 3, "microbatches": 2}),
        (2, {"tp": 2, "sp": 0}),
        (2, {"tp": 2, "sp": 1}),
        (2, {"pp": 2, "microbatches": 2}),
        (2, {"pp": 2, "microbatches": 4, "schedule": "zero_bubble"}),
        (4, {"dp": 4, "zero": 3, "dp_shard": 2}),
    ],
    ids=str,
)
def test_ranks_train_as_without(pools: Pools, ranks: int, pins: dict[str, Any]) -> None:
    for differ, num_offloaded, device_bytes, stored_bytes in pools.run(
        ranks, f"{POOLED}:compared", pins
    ):
        assert differ == [] and num_offloaded > 0 and device_bytes == stored_bytes


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "pins", "family", "options"),
    [
        (2, {"dp": 2, "zero": 0}, "gpt2", {}),
        (2, {"dp": 2, "zero": 3}, "llama", {}),
        (2, {"dp": 2, "zero": 3}, "gpt2", {"precision": "bf16"}),
        (2, {"dp": 2, "zero": 3, "recompute": "full"}, "dropout", {"mode": "scheduled"}),
        (2, {"dp": 2, "zero": 3, "allgather_bucket_bytes": "1MB"}, "stack", {}),
        (2, {"dp": 2, "zero": 3, "microbatches": 2}, "stack", {}),
        (2, {"tp": 2, "sp": 1}, "llama", {}),
        (2, {"pp": 2, "microbatches": 2}, "gpt2", {}),
        (2, {"pp": 2, "microbatches": 4, "schedule": "zero_bubble"}, "stack", {}),
        (2, {"pp": 2, "microbatches": 2}, "stack", {"precision": "bf16"}),
        (4, {"pp": 2, "dp": 2, "zero": 3, "microbatches": 2}, "llama", {}),
        (4, {"dp": 4, "zero": 3, "dp_shard": 2}, "stack", {}),
    ],
    ids=str,
)
def test_parameters_of_ranks_that_come_by_layer_train_as_without(
    pools: Pools, ranks: int, pins: dict[str, Any], family: str, options: dict[str, Any]
) -> None:
    arguments = pins, family, "parameters"
    for found in pools.run(ranks, f"{POOLED}:compared", *arguments, **options):
        assert Compared(*found).differ == []


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("pins", [{"dp": 2, "zero": 3}, {"pp": 2, "microbatches": 2}], ids=str)
@pytest.mark.parametrize("precision", ["model", "bf16"])
def test_families_train_as_without(pools: Pools, pins: dict[str, Any], precision: str) -> None:
    """With a tied embedding, on both stages of a pipeline."""
    for found in pools.run(2, f"{POOLED}:compared", pins, "gpt2", precision=precision):
        assert Compared(*found).differ == []


@pytest.mark.parametrize("offloads", [("optimizer", "none"), ("none", "optimizer")], ids=str)
def test_checkpoints_go_from_one_to_the_other(tmp_path: Path, offloads: tuple[str, str]) -> None:
    first, second = ({"offload": offload} for offload in offloads)
    assert checkpointed(str(tmp_path / "last"), first, second)


@pytest.mark.multiprocess
@pytest.mark.slow
def test_checkpoints_go_from_ranks_to_other_ranks(pools: Pools, tmp_path: Path) -> None:
    plans = {"dp": 2, "zero": 3, "offload": "optimizer"}, {"dp": 2, "zero": 2}
    assert all(pools.run(2, f"{POOLED}:checkpointed", str(tmp_path / "last"), *plans))


@pytest.mark.parametrize("offload", ["optimizer", "parameters", "disk"])
def test_evaluation_and_batches_of_other_sizes_read_what_the_host_has(offload: str) -> None:
    run = started({"offload": offload}).steps(1)
    right = started({}).steps(1)
    half = {name: x[:4] for name, x in run.batch.items()}
    for batch in (run.batch, half):
        with torch.no_grad():
            assert torch.equal(run.model(**batch), right.model(**batch))
    (run.model(**half) + run.model(**run.batch)).backward()  # two forwards, then their backwards
    (right.model(**half) + right.model(**run.batch)).backward()
    for a, b in zip(run.model.parameters(), right.model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("family", ["dropout", "gpt2", "llama", "mixtral"])
def test_activations_come_back_as_they_left(family: str) -> None:
    found = activations_compared({}, family)
    assert found.differ == []
    assert found.num_bytes_to_host == found.num_bytes_to_device > 0


def test_what_leaves_is_what_the_plan_says() -> None:
    """Six forwards of four layers, of which each keeps tanh(up(x)) of 8 samples."""
    found = activations_compared({})
    assert found.num_bytes_to_host == 6 * 4 * (8 * 16 * 8)


def test_activations_in_bf16_beside_masters_leave() -> None:
    found = activations_compared({}, precision="bf16")
    assert found.differ == [] and found.num_bytes_to_host == 6 * 4 * (8 * 16 * 2)


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.rotated(2)
@pytest.mark.parametrize(
    ("ranks", "pins"),
    [
        (2, {"dp": 2, "zero": 0}),
        (2, {"dp": 2, "zero": 2}),
        (2, {"dp": 2, "zero": 3}),
        (2, {"tp": 2, "sp": 0}),
        (2, {"tp": 2, "sp": 1}),
        (4, {"dp": 4, "zero": 3, "dp_shard": 2}),
        (4, {"dp": 2, "tp": 2, "zero": 3}),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["dropout", "gpt2", "llama", "vit"])
def test_activations_of_ranks_come_back(
    pools: Pools, ranks: int, pins: dict[str, Any], family: str
) -> None:
    for found in pools.run(ranks, f"{POOLED}:activations_compared", pins, family):
        differ, to_host, to_device = Saved(*found)
        assert differ == [] and to_host == to_device > 0
