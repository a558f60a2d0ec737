"""Rates of attention kernels, and scores that go through memory, by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfold.cost_models.op_costs.attention import BACKWARD_SHARE, FORWARD_SHARE, Scores
from meshfold.cost_models.op_costs.compute import Work
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.ir.cluster import ClusterSpec, DeviceSpec, LinkSpec, NodeGroup
from meshfold.ir.mesh import Mesh

DEVICE = DeviceSpec("device", 1000, 50.0, {"float32": 100.0}, 0.5, 0.8, 2.0, 0, "test")
NETWORK = LinkSpec("network", 10.0, 5.0, "test")


def costs(device: DeviceSpec = DEVICE) -> CostModel:
    link = replace(NETWORK, name="link")
    return CostModel(ClusterSpec("one", (NodeGroup(device, 1, 1, link),), NETWORK), Mesh(()))


def work(head_size: int, *, is_causal: bool = False) -> Work:
    """Of 2 x 3 heads of 4 queries and 5 keys: 120 scores."""
    num = 2 * 3 * 4 * 5
    flops = 4 * num * head_size / (2 if is_causal else 1)
    return Work(flops, 400, 2.5 * flops, 800, Scores(num, head_size))


def test_a_fused_kernel_runs_at_its_own_rate() -> None:
    device = replace(DEVICE, attention_efficiency=0.4, attention_backward_efficiency=0.25)
    forward_s, backward_s = costs(device).op_s(work(128), "float32")
    assert forward_s == pytest.approx(2 + 4 * 120 * 128 / (100 * 0.4) + 400 / 40)
    assert backward_s == pytest.approx(2 + 10 * 120 * 128 / (100 * 0.25) + 800 / 40)


def test_a_device_without_rates_has_shares_of_its_products() -> None:
    forward_s, backward_s = costs().op_s(work(128), "float32")
    assert forward_s == pytest.approx(2 + 61440 / (100 * 0.5 * FORWARD_SHARE) + 10)
    assert backward_s == pytest.approx(2 + 153600 / (100 * 0.5 * BACKWARD_SHARE) + 20)


def test_small_heads_have_less_work_for_matrix_units() -> None:
    """(1 + 22 / 128) / (1 + 22 / 64) = 0.872, as published."""
    assert Scores(1, 64).of_rate == pytest.approx(0.872, abs=5e-4)
    assert Scores(1, 128).of_rate == 1
    assert Scores(1, 256).of_rate > 1


def test_a_causal_kernel_has_half_of_the_flops_and_unfused_all() -> None:
    whole, half = (costs().op_s(work(128, is_causal=c), "float32")[0] for c in (False, True))
    assert (half - 12) * 2 == pytest.approx(whole - 12)
    unfused = costs(replace(DEVICE, fused_attention=False))
    forward_s, backward_s = unfused.op_s(work(128, is_causal=True), "float32")
    # 120 scores of 4 bytes, six times and a mask; nine times and a mask.
    assert forward_s == pytest.approx(2 + 61440 / 50 + (400 + 120 * 25) / 40)
    assert backward_s == pytest.approx(2 + 2 * 61440 / 50 + (800 + 120 * 37) / 40)


def test_no_gradient_no_backward() -> None:
    frozen = replace(work(128), backward_flops=0, backward_bytes=0)
    for device in (DEVICE, replace(DEVICE, fused_attention=False)):
        assert costs(device).op_s(frozen, "float32")[1] == 0


@given(
    st.sampled_from([32, 64, 128, 256]),
    st.booleans(),
    st.booleans(),
    st.integers(1, 64),
    st.floats(0.01, 1),
)
def test_shards_are_never_slower_and_never_more_than_their_number_faster(
    head_size: int, is_causal: bool, is_fused: bool, shards: int, share: float
) -> None:
    model = costs(replace(DEVICE, fused_attention=is_fused))
    own = work(head_size, is_causal=is_causal)
    whole = model.op_s(own, "float32")
    part = model.op_s(own, "float32", shards, max(share, 1 / shards))
    for all_s, part_s in zip(whole, part, strict=True):
        assert all_s / shards - 1e-9 <= part_s <= all_s + 1e-9
