"""Rates of kernels, alone and in models: what points were made of is found again."""

from dataclasses import replace

import pytest

from meshfold.cost_models.calibration.kernel_rates import (
    Rates,
    best_rate,
    kernel_rates,
    model_rates,
)
from meshfold.cost_models.calibration.points import KernelPoint
from meshfold.errors import ClusterSpecError

TRUE = Rates(5e-6, 1e10, {"bfloat16": 2e12, "float32": 1e12}, {"float32": 5e11})


def made(kind: str, dtype: str, kernels: int, *work: float) -> KernelPoint:
    """work: flops, flops of attention, bytes."""
    point = KernelPoint(kind, dtype, kernels, *work, seconds=1.0)  # type: ignore[arg-type]
    return replace(point, seconds=TRUE.seconds(point))


POINTS = {
    "start": made("launch", "float32", 1, 0, 0, 96),
    "copy": made("memory", "float32", 1, 0, 0, 1e8),
    "small": made("gemm", "float32", 1, 1e8, 0, 1e5),
    "large": made("gemm", "float32", 1, 1e11, 0, 1e7),
    "half": made("gemm", "bfloat16", 1, 1e11, 0, 1e7),
    "attention": made("attention", "float32", 2, 0, 1e10, 1e6),
    "block": made("block", "float32", 90, 1e10, 1e9, 1e8),
}


def test_seconds_by_hand() -> None:
    point = KernelPoint("block", "float32", 3, 2e12, 1e12, 5e9, 1.0)
    assert TRUE.seconds(point) == pytest.approx(3 * 5e-6 + 2 + 2 + 0.5)


def test_what_kernels_are_made_of_is_found() -> None:
    found = kernel_rates({n: p for n, p in POINTS.items() if p.kind != "block"})
    assert found.launch_s == pytest.approx(TRUE.launch_s, rel=1e-3)
    assert found.memory_bytes_per_s == pytest.approx(TRUE.memory_bytes_per_s, rel=1e-3)
    assert found.flops_per_s == pytest.approx(TRUE.flops_per_s, rel=1e-3)
    assert found.attention_flops_per_s == pytest.approx(TRUE.attention_flops_per_s, rel=1e-3)


def test_pieces_of_models_do_not_move_the_rates_of_kernels() -> None:
    kernels = {n: p for n, p in POINTS.items() if p.kind != "block"}
    slow = replace(POINTS["block"], seconds=9 * POINTS["block"].seconds)
    assert kernel_rates({**kernels, "block": slow}) == kernel_rates(kernels)


def test_a_model_says_by_what_its_kernels_are_slower() -> None:
    in_model = TRUE.slower(40e-6, 1.5)
    small, large = POINTS["block"], replace(POINTS["block"], flops=1e9, kernels=50, num_bytes=1e5)
    points = {
        name: replace(p, seconds=in_model.seconds(p))
        for name, p in {"small": small, "large": large}.items()
    }
    found = model_rates(points, TRUE)
    assert found.launch_s == pytest.approx(40e-6, rel=1e-3)
    assert found.flops_per_s["float32"] == pytest.approx(1e12 / 1.5, rel=1e-3)
    assert found.memory_bytes_per_s == pytest.approx(1e10 / 1.5, rel=1e-3)
    assert found.attention_flops_per_s["float32"] == pytest.approx(5e11 / 1.5, rel=1e-3)


def test_products_of_another_dtype_have_a_factor_of_their_own() -> None:
    in_model = TRUE.slower(40e-6, 1.5, {"bfloat16": 6.0})
    assert in_model.flops_per_s == pytest.approx({"bfloat16": 2e12 / 6, "float32": 1e12 / 1.5})
    small, large = POINTS["block"], replace(POINTS["block"], flops=1e9, kernels=50, num_bytes=1e5)
    pieces = [replace(p, dtype=d) for d in ("float32", "bfloat16") for p in (small, large)]
    no_attention = [replace(p, attention_flops=0.0) for p in pieces]
    points = {str(p): replace(p, seconds=in_model.seconds(p)) for p in no_attention}
    found = model_rates(points, TRUE)
    assert found.launch_s == pytest.approx(40e-6, rel=1e-3)
    assert found.memory_bytes_per_s == pytest.approx(1e10 / 1.5, rel=1e-3)
    assert found.flops_per_s == pytest.approx(in_model.flops_per_s, rel=1e-3)


def test_one_piece_tells_no_starts_from_work() -> None:
    other = replace(POINTS["block"], dtype="float16")  # of which no product was measured
    assert model_rates({"block": POINTS["block"], "other": other}, TRUE) == TRUE


@pytest.mark.parametrize("missing", [("small", "large"), ("copy",)])
def test_too_few_points_are_refused(missing: tuple[str, ...]) -> None:
    points = {name: p for name, p in POINTS.items() if name not in missing}
    with pytest.raises(ClusterSpecError, match="too little was measured .* more --minutes"):
        kernel_rates(points)


def test_best_rate() -> None:
    best = best_rate(POINTS.values(), "gemm", "float32")
    assert best == pytest.approx(POINTS["large"].rate_per_s)
    assert best_rate([], "gemm") == float("inf")
