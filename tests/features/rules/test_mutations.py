"""The gate of the rule table catches wrong rules; the whole score is benchmarks/mutations.py."""

import pytest
from support.graphs.mutations import Mutant, is_caught, is_right, mutants, score, types_of
from support.graphs.ops import SingleOp
from support.graphs.samples import EXPERTS, LOSS, NORMALIZATION, RANDOM, RING, SAMPLES, Sample
from support.graphs.tensors import real

from meshfold.ir.spmd import PARTIAL, Shard


def test_a_sample_of_all_mutants_is_caught() -> None:
    found = score(SAMPLES[::4], every=97)
    assert found.caught > 150
    assert found.survivors == []


@pytest.mark.slow
@pytest.mark.parametrize("samples", [EXPERTS, LOSS, NORMALIZATION, RANDOM, RING])
def test_all_mutants_of_a_family_are_caught(samples: tuple[Sample, ...]) -> None:
    found = score(samples)
    assert found.caught > 100
    assert found.survivors == []


def test_what_is_right_by_meaning_passes_the_gate() -> None:
    """zeros_like reads no numbers, and pending sums of zeros are zeros."""
    op = SingleOp("aten.zeros_like.default", real(4, 12))
    right = [m for m in mutants(op) if is_right(op, m)]
    assert {types_of(m.typing)[1] for m in right} >= {PARTIAL}
    assert not any(is_caught(op, m) for m in right)


def test_a_hole_in_the_gate_is_named() -> None:
    """Ceilings of numbers between 0 and 1 are 1: a sample that cannot tell ranks apart."""
    blind = SingleOp("aten.ceil.default", real(4, 12))
    found = score([("ceil.default", lambda: blind)])
    assert any("operand 0 as S1/2" in text for text in found.survivors)


def test_a_mutant_says_what_changed() -> None:
    op = SingleOp("aten.linear.default", real(4, 12), real(36, 12))
    texts = [str(m) for m in mutants(op)]
    assert "rule k (S1 S1 -> P), output 0 as I" in texts
    assert "rule k (S1 S1 -> P), operand 0 as R" in texts


def test_what_torch_takes_on_trust_is_checked() -> None:
    """torch reads behind the end of weights that are shorter than the channels."""
    op = SingleOp(
        "aten._native_batch_norm_legit_no_training.default",
        *(real(24, 12), real(12), real(12), real(12, grad=False), 1 + real(12, grad=False)),
        *(0.1, 1e-5),
    )
    (rule,) = (t for t in op.typings(2) if t.rules == ("R",))
    assert is_caught(op, Mutant(rule, 1, Shard(0)))
