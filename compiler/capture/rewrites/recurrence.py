"""LSTM and GRU with dropout between their layers: one op a layer, with dropout of ours between.

    lstm(x, [h, c], [of layer 0, of layer 1, ...], dropout=p)
        -> lstm(x, [h[0], c[0]], [of layer 0]) -> dropout(p) -> lstm(.., [h[1], c[1]], ..) -> ..

The ops draw nothing by themselves then, and dropout draws what no sharding changes
(meshfold.ops.counter_rng). States of the layers are joined.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshfold.capture.trace.raw_program import Key, Operand, RawArg, RawOp, RawProgram
from meshfold.ir.op_graph import Value
from meshfold.passes.rules.ops.recurrence import PARAMETERS, RECURRENCES


def with_layers(program: RawProgram) -> RawProgram:
    """`program` without dropout inside of a recurrence."""
    values = dict(program.values)
    ops: list[RawOp] = []
    for op in program.ops:
        given = dict(zip(PARAMETERS.split(), op.args, strict=False))
        drops = op.target in RECURRENCES and given["train"] and given["dropout"] > 0.0
        ops += _Layers(op, given, values).ops() if drops and given["num_layers"] > 1 else [op]
    return replace(program, ops=ops, values=values)


@dataclass
class _Layers:
    """The ops in place of `op`; `values` takes what they make. given: its arguments by name."""

    op: RawOp
    given: dict[str, RawArg]
    values: dict[Key, Value]

    def ops(self) -> Iterator[RawOp]:
        given, last = self.given, self.given["num_layers"] - 1
        directions = 2 if given["bidirectional"] else 1
        states = given["hx"] if isinstance(given["hx"], tuple) else (given["hx"],)
        out, *finals = self.op.outputs
        per_layer = len(given["params"]) // given["num_layers"]
        x = given["input"]
        made: list[list[str]] = [[] for _ in finals]
        for layer in range(last + 1):
            name = f"{out}:{layer}"
            parts = []
            for k, state in enumerate(states):
                rows = layer * directions, (layer + 1) * directions
                parts.append(Operand(f"{name}:start{k}"))
                yield self._slice(f"{name}:start{k}", state, *rows)
            ends = [f"{name}:h{k}" for k in range(len(finals))]
            results = [out if layer == last else name, *ends]
            for k, key in enumerate(ends):
                made[k].append(key)
                self._like(key, finals[k], directions)
            self._like(results[0], out)
            hx = tuple(parts) if isinstance(given["hx"], tuple) else parts[0]
            own = given["params"][layer * per_layer : (layer + 1) * per_layer]
            rest = given["train"], given["bidirectional"], given["batch_first"]
            args = (x, hx, own, given["has_biases"], 1, 0.0, *rest)
            yield replace(self.op, args=args, kwargs=(), outputs=tuple(results))
            if layer < last:
                self._like(f"{name}:kept", out)
                yield self._make("dropout", f"{name}:kept", Operand(name), given["dropout"], True)
                x = Operand(f"{name}:kept")
        for key, of_layers in zip(finals, made, strict=True):
            yield self._make("cat", key, tuple(map(Operand, of_layers)), 0)

    def _like(self, key: str, other: str, rows: int | None = None) -> None:
        """Describe `key` as `other`, with so many rows of dim 0."""
        value = self.values[other]
        shape = value.shape if rows is None else (rows, *value.shape[1:])
        self.values[key] = replace(value, shape=shape)

    def _slice(self, key: str, state: Operand, start: int, end: int) -> RawOp:
        value = self.values[state.key]
        self.values[key] = replace(value, shape=(end - start, *value.shape[1:]))
        made = self._make("slice", key, state, 0, start, end, 1)
        return replace(made, target="aten.slice.Tensor")

    def _make(self, name: str, key: str, *args: RawArg) -> RawOp:
        target = f"aten.{name}.default"
        return replace(self.op, target=target, args=args, kwargs=(), outputs=(key,))
