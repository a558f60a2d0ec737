"""One-op graphs of recurrences: LSTM, GRU, plain ones, and their single steps."""

from support.graphs.calls import Sample, call
from support.graphs.tensors import real


def _recurrence(
    name: str, gates: int, *, layers: int = 1, both: bool = False, batch_first: bool = False
) -> Sample:
    """Sequences of 3 steps, 12 samples, width 4."""
    num, width = layers * (1 + both), 4
    state = real(num, 12, width)
    params = []
    for layer in range(layers):
        wide = width * (1 + both) if layer else width
        for direction in range(1 + both):
            seed = 11 * layer + direction
            shapes = ((gates * width, wide), (gates * width, width), (gates * width,))
            params += [real(*shape, seed=seed + k) for k, shape in enumerate(shapes)]
            params.append(real(gates * width, seed=seed + 5))
    x = real(12, 3, width) if batch_first else real(3, 12, width)
    hx = [state, real(num, 12, width, seed=8)] if name == "lstm" else state
    return call(f"{name}.input", x, hx, params, True, layers, 0.0, True, both, batch_first)


RECURRENCE: tuple[Sample, ...] = (
    _recurrence("lstm", 4),
    _recurrence("lstm", 4, layers=2, both=True, batch_first=True),
    _recurrence("gru", 3, both=True),
    _recurrence("gru", 3, layers=2, batch_first=True),
    _recurrence("rnn_tanh", 1),
    _recurrence("rnn_relu", 1),
    call(
        "lstm_cell.default",
        *(real(12, 4), [real(12, 4, seed=8), real(12, 4, seed=9)]),
        *(real(16, 4), real(16, 4, seed=8), real(16), real(16, seed=8)),
    ),
    call("gru_cell.default", real(12, 4), real(12, 4, seed=8), real(12, 4), real(12, 4, seed=8)),
    call("rnn_tanh_cell.default", real(12, 4), real(12, 4, seed=8), real(4, 4), real(4, 4, seed=8)),
    call("rnn_relu_cell.default", real(12, 4), real(12, 4, seed=8), real(4, 4), real(4, 4, seed=8)),
)
