"""Rates of kernels from measured points.

    t = kernels * launch + flops / (peak * matmul_efficiency) + attention flops / their rate
        + bytes / (bandwidth * memory_efficiency)

by least squares of relative errors, no term below 0. Pieces of models count as much as all other
points of a profile together: they are what plans are made of.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshfold.cost_models.calibration.least_squares import non_negative
from meshfold.cost_models.calibration.points import KernelKind, KernelPoint
from meshfold.errors import ClusterSpecError


@dataclass(frozen=True)
class Rates:
    """Factors of the additive time of kernels."""

    launch_s: float
    memory_bytes_per_s: float
    flops_per_s: Mapping[str, float]
    """Of products, by dtype."""
    attention_flops_per_s: Mapping[str, float]

    def seconds(self, point: KernelPoint) -> float:
        """What these rates say of a point. Raises KeyError for a dtype without a rate."""
        found = point.kernels * self.launch_s + point.num_bytes / self.memory_bytes_per_s
        if point.flops:
            found += point.flops / self.flops_per_s[point.dtype]
        if point.attention_flops:
            found += point.attention_flops / self.attention_flops_per_s[point.dtype]
        return found


def fitted_rates(points: Mapping[str, KernelPoint]) -> Rates:
    """Raises ClusterSpecError without a product in float32 or a kernel that moves bytes."""
    found = {p.kind for p in points.values() if p.kind != "gemm" or p.dtype == "float32"}
    if not {"gemm", "memory"} <= found:
        raise ClusterSpecError(
            "profile: too little was measured for a cluster (no product in float32, or no kernel "
            "that moves bytes); give it more --minutes"
        )
    some = list(points.values())
    products = sorted({p.dtype for p in some if p.flops})
    attention = sorted({p.dtype for p in some if p.attention_flops})
    weights = _weights(some)
    rows = [
        [w * x / p.seconds for x in _terms(p, products, attention)]
        for w, p in zip(weights, some, strict=True)
    ]
    launch_s, per_byte, *per_flop = non_negative(rows, weights)
    ends = zip([*products, *attention], per_flop, strict=True)
    # A term that the fit does without is as fast as the fastest kernel that is made of it.
    rates = [
        (dtype, 1 / x if x else best_rate(some, kind, dtype))
        for (dtype, x), kind in zip(
            ends, ["gemm"] * len(products) + ["attention"] * len(attention), strict=True
        )
    ]
    return Rates(
        launch_s,
        1 / per_byte if per_byte else best_rate(some, "memory"),
        dict(rates[: len(products)]),
        dict(rates[len(products) :]),
    )


def best_rate(points: Iterable[KernelPoint], kind: KernelKind, dtype: str = "") -> float:
    """The best that kernels of a kind, and of a dtype, reach; infinity of none."""
    rates = [p.rate_per_s for p in points if p.kind == kind and dtype in ("", p.dtype)]
    return max(rates, default=math.inf)


def _terms(point: KernelPoint, products: Sequence[str], attention: Sequence[str]) -> list[float]:
    return [
        point.kernels,
        point.num_bytes,
        *(point.flops * (point.dtype == dtype) for dtype in products),
        *(point.attention_flops * (point.dtype == dtype) for dtype in attention),
    ]


def _weights(points: Sequence[KernelPoint]) -> list[float]:
    num_blocks = sum(p.kind == "block" for p in points)
    of_block = math.sqrt((len(points) - num_blocks) / num_blocks) if num_blocks else 1.0
    return [of_block if p.kind == "block" else 1.0 for p in points]
