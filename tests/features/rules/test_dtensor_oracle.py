"""A second opinion on the rule table: where DTensor runs an op without communication, its results
have the placements of our rule."""

from collections.abc import Sequence

import pytest
from support.graphs.dtensor import one_of_two_ranks, opinions
from support.graphs.ops import SingleOp
from support.graphs.samples import RING, SAMPLES, Sample
from support.graphs.tensors import real

from meshfold.ir.strategy import OpTyping

ENDLESS = "scaled_dot_product_attention"
"""Of its decomposition DTensor tries all placements, which takes hours."""

CONVOLUTIONS = {
    *(f"conv{n}d" for n in (1, 2, 3)),
    *(f"conv_transpose{n}d" for n in (1, 2, 3)),
}
"""DTensor calls their results replicated where weights are shards: over output channels, which are
then a part, and over input channels, whose sums are pending."""

OTHERWISE = {
    "expand": "DTensor repeats what is whole as a whole; our rule repeats a rank's part alone",
    "broadcast_tensors": "as expand",
    "repeat_interleave": "as expand, of one entry",
    "_native_batch_norm_legit_no_training": "its second and third result are empty",
}
"""Ops that can be run in two ways."""


def asked(samples: Sequence[Sample]) -> int:
    """How many rules DTensor agrees with; it differs from none but those above. It knows of no
    ring: it would run what a probe runs."""
    with one_of_two_ranks() as mesh:
        theirs = [s for s in samples if ENDLESS not in s[0] and s not in RING]
        counts, differences = opinions(theirs, mesh)
    found = {name: texts for name, texts in differences.items() if name not in OTHERWISE}
    assert set(found) <= CONVOLUTIONS, found
    return counts["agrees"]


def test_dtensor_agrees_with_a_part_of_the_table() -> None:
    assert asked(SAMPLES[::7]) > 100


@pytest.mark.slow
def test_dtensor_agrees_with_the_table() -> None:
    assert asked(SAMPLES) > 1000


def test_a_wrong_rule_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over shards that are no sums."""
    op = SingleOp("aten.sum.dim_IntList", real(4, 12), [1])
    (pending,) = (
        t
        for t in op.typings(2)
        if t.outputs[0][0].kind == "P" and t.inputs[0][0].is_shard and t.inputs[0][0].blocks == 1
    )
    (whole,) = (t for t in op.typings(2) if t.rules == ("I",))
    wrong = OpTyping(pending.rules, pending.inputs, whole.outputs)
    monkeypatch.setattr(SingleOp, "typings", lambda self, *sizes: [wrong])
    with one_of_two_ranks() as mesh:
        counts, differences = opinions([("sum.dim_IntList", lambda: op)], mesh)
    assert counts["differs"] == 1
    assert "Partial" in differences["sum"][0]
