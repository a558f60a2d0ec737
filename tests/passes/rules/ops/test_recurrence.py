"""Recurrences are shared by batch alone. That each rule is right is tested with all others, in
tests/passes/rules/test_table.py."""

import pytest
from support.graphs.ops import SingleOp
from support.graphs.tensors import real


def lstm(*, batch_first: bool, dropout: float = 0.0) -> SingleOp:
    parameters = [real(16, 6), real(16, 4), real(16), real(16)]
    states = [real(1, 8, 4), real(1, 8, 4)]
    rows = real(8, 5, 6) if batch_first else real(5, 8, 6)
    arguments = (True, 1, dropout, True, False, batch_first)
    return SingleOp("aten.lstm.input", rows, states, parameters, *arguments)


@pytest.mark.parametrize("batch_first", [True, False])
def test_the_batch_and_nothing_else(batch_first: bool) -> None:
    rules = [r for r in lstm(batch_first=batch_first).axis_rules(2) if r.inputs[0].is_shard]
    assert {(r.inputs[0].dim, r.inputs[1].dim) for r in rules} == {(0 if batch_first else 1, 1)}
    assert all(not t.is_shard for r in rules for t in r.inputs[3:])


def test_dropout_between_layers_has_no_rule() -> None:
    found = lstm(batch_first=True, dropout=0.5).axis_rules(2)
    assert not [r for r in found if any(t.is_shard for t in r.inputs)]
