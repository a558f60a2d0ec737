"""Recurrences probed at three lengths: the answer is that of a run at the length asked for."""

import pytest
from support.programs.memory import CountingProber

from meshfold.cost_models.memory.op_memory import ProbeKey, dense_spec
from meshfold.ir.op_graph import Ref
from meshfold.memory_probe.prober import OpProber
from meshfold.memory_probe.recurrence import LENGTHS

BATCH, WIDTH, INPUT = 4, 8, 12


def recurrence(
    length: int, batch_first: bool, name: str = "lstm", *, trained: bool = True
) -> ProbeKey:
    gates = {"lstm": 4, "gru": 3}[name]
    shape = (BATCH, length, INPUT) if batch_first else (length, BATCH, INPUT)
    states = 2 if name == "lstm" else 1
    weights = [(gates * WIDTH, INPUT), (gates * WIDTH, WIDTH)]
    shapes = [shape, *[(1, BATCH, WIDTH)] * states, *weights]
    operands = tuple(dense_spec(s, "float32", trained) for s in [*shapes, *[(gates * WIDTH,)] * 2])
    hx = (Ref(1), Ref(2)) if name == "lstm" else Ref(1)
    params = tuple(Ref(k) for k in range(1 + states, 5 + states))
    args = (Ref(0), hx, params, True, 1, 0.0, True, False, batch_first)
    return ProbeKey(f"aten.{name}.input", args, (), operands)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("name", ["lstm", "gru"])
@pytest.mark.parametrize(("length", "trained"), [(21, False), (13, True), (30, True)])
def test_it_is_what_a_run_says(name: str, batch_first: bool, length: int, trained: bool) -> None:
    key = recurrence(length, batch_first, name, trained=trained)
    assert OpProber()(key) == OpProber()._probe(key)


def test_three_runs_answer_for_all_lengths() -> None:
    prober = CountingProber()
    for length in (100, 1000, 100_000):
        prober(recurrence(length, True))
    assert prober.num_probes == len(LENGTHS)
