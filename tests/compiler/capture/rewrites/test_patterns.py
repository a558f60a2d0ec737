"""Makers and readers of values of a captured program."""

from meshfold.capture.rewrites.patterns import CAST, Patterns
from meshfold.capture.trace.raw_program import Operand, RawOp, RawProgram
from meshfold.ir.op_graph import Symbol, Value


def op(target: str, output: str, *args: object, **kwargs: object) -> RawOp:
    return RawOp(target, args, tuple(kwargs.items()), (output,), (), "")


def program() -> RawProgram:
    wide = Symbol("dtype", "float32")
    ops = [
        op("aten.exp.default", "x", 1.0),
        op(CAST, "wide", Operand("x"), dtype=wide),
        op(CAST, "moved", Operand("x"), dtype=wide, device=Symbol("device", "cpu")),
        op("aten.mul.Tensor", "square", Operand("wide"), Operand("wide")),
        op("aten.add.Tensor", "sum", Operand("square"), Operand("moved")),
        op("aten.neg.default", "other", Operand("moved")),
    ]
    values = {o.outputs[0]: Value((3,), "float32") for o in ops} | {"x": Value((3,), "bfloat16")}
    return RawProgram(ops, values, outputs=[("", "sum"), ("kept", "square")])


def test_readers() -> None:
    patterns = Patterns(program())
    (square,) = (o for o in program().ops if o.outputs == ("square",))
    assert patterns.reader("wide") == square, "one op reads it, twice"
    assert patterns.reader("moved") is None, "two ops read it"
    assert patterns.reader("square") is None, "it is an output, too"
    assert patterns.reader("other") is None, "nothing reads it"
    assert patterns.maker(Operand("square"), "aten.mul.Tensor") == square
    assert patterns.inner(Operand("square"), "aten.mul.Tensor") is None
    assert patterns.maker(1.0, "aten.mul.Tensor") is patterns.value(1.0) is None


def test_casts() -> None:
    patterns = Patterns(program())
    assert patterns.before_cast(Operand("wide")) == Operand("x")
    assert patterns.before_cast(Operand("moved")) == Operand("moved"), "it may move, too"
    assert patterns.before_cast(Operand("x")) == Operand("x")
