"""Enumeration of uniform strategies and what pins do to it."""

import pytest

from meshfold.cost_models.devices import resolve_cluster
from meshfold.cost_models.meshes import mesh_candidates
from meshfold.errors import OptionError
from meshfold.passes.candidates import BATCH, PINNED, enumerate_candidates
from meshfold.strategy import UniformStrategy


def candidates(num_devices, pins=None, batch_size=8):
    meshes = mesh_candidates(resolve_cluster(f"local-cpux{num_devices}"), num_devices)
    return enumerate_candidates(meshes, pins or {}, batch_size)


def test_four_devices():
    labels = [s.label for s in candidates(4).strategies]
    assert labels == [
        "dp4",
        "dp4, zero3",
        "dp2 x tp2",
        "dp2 x tp2+sp",
        "dp2 x tp2, zero3",
        "dp2 x tp2+sp, zero3",
        "tp4",
        "tp4+sp",
    ]


def test_one_device_has_one_strategy():
    assert candidates(1).strategies == (UniformStrategy(),)


def test_batch_that_does_not_divide_is_a_cut():
    found = candidates(4, batch_size=6)
    assert {s.dp for s in found.strategies} == {1, 2}
    assert found.cuts == {BATCH: 2}


def test_pins():
    found = candidates(4, {"tp": 2, "sp": 1})
    assert [s.label for s in found.strategies] == ["dp2 x tp2+sp", "dp2 x tp2+sp, zero3"]
    assert found.cuts == {PINNED: 6}


@pytest.mark.parametrize(
    ("pins", "batch_size", "message"),
    [
        ({"dp": 3}, 8, "pin dp=3 cannot be kept on 4 devices; dp can be 1, 2, 4"),
        ({"tp": 8}, 8, "pin tp=8 cannot be kept on 4 devices; tp can be 1, 2, 4"),
        (
            {"tp": 4, "zero": 3},
            8,
            "pin zero=3 cannot be kept .* with the other pins; zero can be 0",
        ),
        ({"dp": 4, "sp": 1}, 8, "pin sp=1 cannot be kept .* with the other pins; sp can be 0"),
        ({"dp": 4}, 6, "a batch of 6 does not divide over dp=4"),
        ({"zero": 3}, 3, "a batch of 3 does not divide over dp=2, dp=4"),
    ],
)
def test_pins_that_cannot_be_kept(pins, batch_size, message):
    with pytest.raises(OptionError, match=message):
        candidates(4, pins, batch_size)
