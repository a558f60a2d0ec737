"""Links from collectives: curves that the cost model made are met again."""

from itertools import product

import pytest

from meshfold.cost_models.calibration.link_rates import fitted_link, fitted_network, link_errors
from meshfold.cost_models.calibration.points import CollectivePoint
from meshfold.cost_models.hardware.topology import GroupShape
from meshfold.cost_models.op_costs.collective_time import KINDS, collective_s
from meshfold.ir.cluster import LinkSpec, RankRate

UNKNOWN = LinkSpec("unknown", 1e9, 1e-5, "a test")
LINK = LinkSpec(
    "link",
    4e9,
    2e-6,
    "a test",
    3e-5,
    2e4,
    bytes_per_s_by_ranks=(RankRate(2, 2e9), RankRate(4, 4e9)),
)
NETWORK = LinkSpec("network", 1e9, 1e-5, "a test", 5e-5, 1e5)
IN_NODE = (GroupShape(2, 1, 2, 2), GroupShape(4, 1, 4, 4))
BETWEEN = (GroupShape(8, 2, 4, 4), GroupShape(2, 2, 1, 1))
SIZES = (2**12, 2**16, 2**20, 2**23)


def measured(shapes: tuple[GroupShape, ...]) -> dict[str, CollectivePoint]:
    return {
        f"{kind}/{size}/{shape}": CollectivePoint(
            kind,
            size,
            shape.num_ranks,
            shape.num_nodes,
            shape.max_per_node,
            shape.min_per_node,
            collective_s(kind, size, shape, LINK, NETWORK),
        )
        for kind, size, shape in product(KINDS, SIZES, shapes)
    }


def test_a_link_meets_the_curves() -> None:
    points = measured(IN_NODE)
    found = fitted_link(points, UNKNOWN)
    assert max(map(abs, link_errors(points, found, UNKNOWN).values())) < 0.02
    assert [n for n, _ in found.bytes_per_s_by_ranks] == [2, 4]
    assert found.bytes_per_s == pytest.approx(4e9, rel=0.02)
    assert found.name == "unknown"


def test_one_size_of_group_needs_one_rate() -> None:
    found = fitted_link(measured(IN_NODE[:1]), UNKNOWN)
    assert found.bytes_per_s_by_ranks == ()
    assert found.bytes_per_s == pytest.approx(4e9, rel=0.5)


def test_a_network_meets_the_curves_over_a_known_link() -> None:
    points = measured(BETWEEN)
    found = fitted_network(points, LINK, UNKNOWN)
    assert max(map(abs, link_errors(points, LINK, found).values())) < 0.02
    assert found.bytes_per_s == pytest.approx(1e9, rel=0.02)


def test_a_link_that_is_all_bytes() -> None:
    points = {
        str(size): CollectivePoint("all_gather", size, 2, 1, 2, 2, size / 2 / 1e9) for size in SIZES
    }
    found = fitted_link(points, UNKNOWN)
    assert max(map(abs, link_errors(points, found, UNKNOWN).values())) < 0.02
    assert found.bytes_per_s == pytest.approx(1e9, rel=0.05)


def test_a_link_that_is_all_starts_has_no_rate_out_of_reach() -> None:
    points = {
        str(size): CollectivePoint("all_gather", size, 2, 1, 2, 2, 1e-3) for size in SIZES[:3]
    }
    found = fitted_link(points, UNKNOWN)
    assert max(map(abs, link_errors(points, found, UNKNOWN).values())) < 0.02
    assert found.bytes_per_s < 1e13
