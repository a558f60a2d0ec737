"""Rates of kernels from measured points.

    t = kernels * launch + flops / (peak * matmul_efficiency) + attention flops / their rate
        + bytes / (bandwidth * memory_efficiency)

First for kernels by themselves, run again and again. In a model they are slower: their operands are
in no cache, and autograd, Python and views come between them. So the pieces of models then say what
a kernel costs beside its work, by what one factor all work is slower, and by what other factor the
products and the attention of each further dtype are: a CPU with fast products in bfloat16 has slow
casts and small kernels around them. The rates that plans are priced with are those. Both fits are
least squares of log(fitted / measured): errors count relatively, and up as much as down.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshfold.cost_models.calibration.least_squares import positive
from meshfold.cost_models.calibration.points import KernelKind, KernelPoint
from meshfold.errors import ClusterSpecError

FEWEST_BLOCKS = 2
"""Pieces of models that tell starts from work."""


@dataclass(frozen=True)
class Rates:
    """Factors of the additive time of kernels."""

    launch_s: float
    memory_bytes_per_s: float
    flops_per_s: Mapping[str, float]
    """Of products, by dtype."""
    attention_flops_per_s: Mapping[str, float]

    def knows(self, point: KernelPoint) -> bool:
        """Whether there are rates for all that a point is made of."""
        return (not point.flops or point.dtype in self.flops_per_s) and (
            not point.attention_flops or point.dtype in self.attention_flops_per_s
        )

    def seconds(self, point: KernelPoint) -> float:
        """What these rates say of a point. Raises KeyError for a dtype without a rate."""
        return point.kernels * self.launch_s + self.work_s(point)

    def work_s(self, point: KernelPoint) -> float:
        """The same without starts."""
        found = point.num_bytes / self.memory_bytes_per_s
        if point.flops:
            found += point.flops / self.flops_per_s[point.dtype]
        if point.attention_flops:
            found += point.attention_flops / self.attention_flops_per_s[point.dtype]
        return found

    def slower(
        self, launch_s: float, factor: float, by_dtype: Mapping[str, float] | None = None
    ) -> "Rates":
        """With work that takes `factor` times as long, and other starts. by_dtype: instead of
        `factor`, for products and attention of a dtype."""
        of = by_dtype or {}
        return Rates(
            launch_s,
            self.memory_bytes_per_s / factor,
            {d: rate / of.get(d, factor) for d, rate in self.flops_per_s.items()},
            {d: rate / of.get(d, factor) for d, rate in self.attention_flops_per_s.items()},
        )


def kernel_rates(points: Mapping[str, KernelPoint]) -> Rates:
    """Of kernels by themselves. Raises ClusterSpecError without a product in float32 or a kernel
    that moves bytes."""
    some = [p for p in points.values() if p.kind != "block"]
    found = {p.kind for p in some if p.kind != "gemm" or p.dtype == "float32"}
    if not {"gemm", "memory"} <= found:
        raise ClusterSpecError(
            "profile: too little was measured for a cluster (no product in float32, or no kernel "
            "that moves bytes); run it again to go on, or give it more --minutes"
        )
    products = sorted({p.dtype for p in some if p.flops})
    attention = sorted({p.dtype for p in some if p.attention_flops})

    def rates_of(factors: Sequence[float]) -> Rates:
        launch_s, per_byte, *per_flop = factors
        rates = [1 / x for x in per_flop]
        of_products, of_attention = rates[: len(products)], rates[len(products) :]
        return Rates(
            launch_s,
            1 / per_byte,
            dict(zip(products, of_products, strict=True)),
            dict(zip(attention, of_attention, strict=True)),
        )

    def errors(factors: Sequence[float]) -> list[float]:
        rates = rates_of(factors)
        return [math.log(rates.seconds(p) / p.seconds) for p in some]

    start = [
        min(p.seconds for p in some),
        1 / best_rate(some, "memory"),
        *(1 / best_rate(some, "gemm", dtype) for dtype in products),
        *(1 / best_rate(some, "attention", dtype) for dtype in attention),
    ]
    return rates_of(positive(errors, start))


def model_rates(points: Mapping[str, KernelPoint], alone: Rates) -> Rates:
    """Of kernels in a model, where enough pieces of models were measured; else `alone`, those of
    kernels by themselves."""
    blocks = [p for p in points.values() if p.kind == "block" and alone.knows(p)]
    if len(blocks) < FEWEST_BLOCKS:
        return alone
    counts = Counter(p.dtype for p in blocks)
    others = sorted(d for d, n in counts.items() if d != "float32" and n >= FEWEST_BLOCKS)

    def rates_of(factors: Sequence[float]) -> Rates:
        launch_s, factor, *of_others = factors
        return alone.slower(launch_s, factor, dict(zip(others, of_others, strict=True)))

    def errors(factors: Sequence[float]) -> list[float]:
        rates = rates_of(factors)
        return [math.log(rates.seconds(p) / p.seconds) for p in blocks]

    return rates_of(positive(errors, [alone.launch_s, 1.0, *[1.0] * len(others)]))


def best_rate(points: Iterable[KernelPoint], kind: KernelKind, dtype: str = "") -> float:
    """The best that kernels of a kind, and of a dtype, reach; infinity of none."""
    rates = [p.rate_per_s for p in points if p.kind == kind and dtype in ("", p.dtype)]
    return max(rates, default=math.inf)
