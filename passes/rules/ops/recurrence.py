"""Rules of recurrences (LSTM, GRU, plain): the batch is a label, all else is needed unsharded.

    input [t, b, i] (batch_first: [b, t, i]), states [layers, b, h], parameters
        -> output [t, b, o], states of every layer

A step needs what all of the step before has led to, so that a shard of the width would gather it
step by step. Dropout between the layers has no rule: capture writes one op a layer then
(meshfold.capture.rewrites.recurrence).
"""

from meshfold.passes.rules.ops.labels import BoundOp, Dims, OpLabels, dim_label, rule

_BATCH = dim_label("b")
_STATE: Dims = (None, _BATCH, None)

RECURRENCES = tuple(f"aten.{name}.input" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"))
"""Ops that go through a sequence of one length for all."""
PARAMETERS = "input hx params has_biases num_layers dropout train bidirectional batch_first"
_CELLS = {
    "aten.lstm_cell.default": "input hx w_ih w_hh b_ih b_hh",
    **{
        f"aten.{name}_cell.default": "input hx w_ih w_hh b_ih b_hh"
        for name in ("gru", "rnn_tanh", "rnn_relu")
    },
}


def _recurrence(op: BoundOp) -> OpLabels | None:
    if op.get("dropout", 0.0) != 0.0 and op.get("train", True) is not False:
        return None
    rows: Dims = (_BATCH, None, None) if op.get("batch_first") is True else _STATE
    states = len(op.positions("hx"))
    whole = tuple((None,) * len(op.values[k].shape) for k in op.positions("params"))
    return OpLabels(
        (rows, *(_STATE,) * states, *whole),
        (rows, *(_STATE,) * (len(op.outputs) - 1)),
    )


def _cell(op: BoundOp) -> OpLabels | None:
    """One step: input [b, i], states [b, h] -> states."""
    if len(op.value("input").shape) != 2:
        return None
    num_rows = 1 + len(op.positions("hx"))
    whole = tuple((None,) * len(v.shape) for v in op.values[num_rows:])
    return OpLabels(
        ((_BATCH, None),) * num_rows + whole,
        ((_BATCH, None),) * len(op.outputs),
    )


RECURRENCE_RULES = {
    **{name: rule(PARAMETERS, _recurrence) for name in RECURRENCES},
    **{name: rule(names, _cell) for name, names in _CELLS.items()},
}
