"""What rewrites ask of a captured program: who makes a value, and who reads it."""

from meshfold.capture.trace.raw_program import Key, Operand, RawArg, RawOp, RawProgram
from meshfold.ir.op_graph import Value

CAST = "aten._to_copy.default"


class Patterns:
    """A program as rewrites look at it."""

    def __init__(self, program: RawProgram) -> None:
        self.values = program.values
        self._makers: dict[Key, RawOp] = {key: op for op in program.ops for key in op.outputs}
        self._readers: dict[Key, list[RawOp]] = {}
        for op in program.ops:
            for key in op.operands:
                self._readers.setdefault(key, []).append(op)
        self._kept = {key for _, key in (*program.outputs, *program.mutations)}

    def value(self, arg: RawArg) -> Value | None:
        """The value that an argument is; None for numbers, and for a source without a value."""
        return self.values.get(arg.key) if isinstance(arg, Operand) else None

    def maker(self, arg: RawArg, *targets: str) -> RawOp | None:
        """The op that makes `arg`, if it is one of `targets`."""
        op = self._makers.get(arg.key) if isinstance(arg, Operand) else None
        return op if op is not None and op.target in targets else None

    def inner(self, arg: RawArg, *targets: str) -> RawOp | None:
        """The same, if no more than one op reads it, and no output is it."""
        op = self.maker(arg, *targets)
        return op if op is not None and self.reader(arg.key) is not None else None

    def reader(self, key: Key) -> RawOp | None:
        """The one op that reads a value; None where there are more, or an output is it."""
        readers = self._readers.get(key, [])
        is_alone = key not in self._kept and all(op is readers[0] for op in readers)
        return readers[0] if readers and is_alone else None

    def is_float_cast(self, op: RawOp) -> bool:
        """Whether an op only makes other floats of floats."""
        if op.target != CAST or [name for name, _ in op.kwargs] != ["dtype"]:
            return False
        source, made = self.value(op.args[0]), self.values[op.outputs[0]]
        return source is not None and source.is_float and made.is_float

    def before_cast(self, arg: RawArg) -> RawArg:
        """What `arg` is a cast of; `arg` if it is none."""
        op = self.maker(arg, CAST)
        return op.args[0] if op is not None and self.is_float_cast(op) else arg
