"""The table of errors by kind."""

import pytest

from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.hardware.error_bands import (
    ErrorBand,
    error_bands,
    family_of,
    read_bands,
    spread_of,
)

TEXT = """{"bands": [{"family": "H100", "kind": "one pass", "spread": "one node", "rows": 3,
"bias": -0.1, "low": -0.2, "high": 0.1}]}"""


def test_a_band_is_found_by_family_kind_and_spread() -> None:
    bands = read_bands(TEXT)
    node = resolve_cluster("dgx-h100")
    assert bands.of(node, "one pass") == ErrorBand(3, -0.1, -0.2, 0.1)
    assert bands.of(node, "stages") is None
    assert bands.of(resolve_cluster("dgx-h100x2"), "one pass") is None
    assert bands.of(resolve_cluster("dgx-a100-80"), "one pass") is None


@pytest.mark.parametrize(
    ("text", "devices", "family", "spread"),
    [
        ("dgx-a100-80x2", None, "A100", "several nodes"),
        ("dgx-h100", 4, "H100", "one node"),
        ("dgx-h100", 1, "H100", "one device"),
    ],
)
def test_kinds(text: str, devices: int | None, family: str, spread: str) -> None:
    cluster = resolve_cluster(text, devices)
    assert (family_of(cluster), spread_of(cluster)) == (family, spread)


def test_the_table_that_comes_along_is_in_order() -> None:
    bands = error_bands().bands
    assert bands
    for band in bands.values():
        assert band.rows > 0
        assert band.low <= band.bias <= band.high
