"""Pieces of models: that they run, and their work by hand."""

import pytest
import torch

from meshfold.profiling.blocks import LAYERS, VOCABULARY, blocks


def test_a_decoder_runs_and_its_products_are_counted() -> None:
    name, build = next((n, b) for n, b in blocks("cpu") if "64x4/2x32" in n)
    found = build()
    assert (found.name, found.kind, found.dtype) == (name, "block", "float32")
    rows, width = 2 * 32, 64
    layer = 3 + 1 + 4 + 4  # squares of the width
    forward = 2 * rows * (LAYERS * layer * width**2 + width * VOCABULARY)
    assert found.flops == 3 * forward
    causal = 2 * (2 * 32 * 32 / 2) * (2 * width)
    of_rate = (1 + 22 / 128) / (1 + 22 / 16)  # heads of 16 features, not of 128
    assert found.attention_flops == pytest.approx(LAYERS * 3.5 * causal / of_rate)
    assert found.kernels > 30
    found.make(torch.device("cpu"))()


def test_every_size_has_a_name() -> None:
    for device_type in ("cpu", "cuda"):
        names = [name for name, _ in blocks(device_type)]
        assert len(names) == len(set(names)) >= 4
