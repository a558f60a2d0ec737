"""A link from measured collectives: start, latency, ramp, and a rate for each size of group, with
which meshfold.cost_models.op_costs.collective_time comes nearest to the measured curves, by least
squares of log(fitted / measured)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshfold.cost_models.calibration.least_squares import positive
from meshfold.cost_models.calibration.points import CollectivePoint
from meshfold.cost_models.op_costs.collective_time import collective_s
from meshfold.ir.cluster import LinkSpec, RankRate

PULL = 0.003
"""Towards the start of the fit: where all is latency, any rate would do."""

Points = Mapping[str, CollectivePoint]


def link_errors(points: Points, link: LinkSpec, network: LinkSpec) -> dict[str, float]:
    """Relative errors of the seconds of collectives over these links."""
    return {
        name: collective_s(p.kind, p.num_bytes, p.shape, link, network) / p.seconds - 1
        for name, p in points.items()
    }


def fitted_link(points: Points, unknown: LinkSpec) -> LinkSpec:
    """The link inside a node, of collectives that stay in one. unknown: its name and source."""
    sizes = sorted({p.num_ranks for p in points.values()})

    def link_of(factors: Sequence[float]) -> LinkSpec:
        *alike, rates = factors[0], factors[1], factors[2], factors[3:]
        by_ranks = tuple(map(RankRate, sizes, rates)) if len(sizes) > 1 else ()
        return replace(_link(unknown, alike, rates[-1]), bytes_per_s_by_ranks=by_ranks)

    def errors(factors: Sequence[float]) -> list[float]:
        return _logs(link_errors(points, link_of(factors), unknown))

    return link_of(positive(errors, _start(points, len(sizes)), PULL))


def fitted_network(points: Points, link: LinkSpec, unknown: LinkSpec) -> LinkSpec:
    """The network, of collectives that cross nodes, over known links in them."""

    def network_of(factors: Sequence[float]) -> LinkSpec:
        return _link(unknown, factors[:3], factors[3])

    def errors(factors: Sequence[float]) -> list[float]:
        return _logs(link_errors(points, link, network_of(factors)))

    return network_of(positive(errors, _start(points, 1), PULL))


def _logs(errors: Mapping[str, float]) -> list[float]:
    return [math.log1p(error) for error in errors.values()]


def _link(unknown: LinkSpec, alike: Sequence[float], bytes_per_s: float) -> LinkSpec:
    start_s, latency_s, ramp_bytes = alike
    return replace(
        unknown,
        bytes_per_s=bytes_per_s,
        start_s=start_s,
        latency_s=latency_s,
        ramp_bytes=ramp_bytes,
    )


def _start(points: Points, num_rates: int) -> list[float]:
    least_s = min(p.seconds for p in points.values())
    rate = max(p.num_bytes / p.seconds for p in points.values())
    return [least_s / 2, least_s / 4, 1e4, *[rate] * num_rates]
