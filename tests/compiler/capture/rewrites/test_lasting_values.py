"""Values that are the same in every step, and programs that take them instead of computing them."""

import torch

from meshfold.capture.rewrites.lasting_values import lasting_values, with_lasting_values
from meshfold.capture.trace.raw_program import Key, Operand, RawOp, RawProgram
from meshfold.ir.op_graph import Source, SourceKind, Value

BUFFER, WRITTEN = (Source(SourceKind.BUFFER, name) for name in ("table", "statistics"))
INPUT, WEIGHT = Source(SourceKind.INPUT, "x"), Source(SourceKind.PARAMETER, "weight")
CONSTANT = Source(SourceKind.CONSTANT, "constant_0")


def op(target: str, *args: object, out: str) -> RawOp:
    read = tuple(Operand(x) if isinstance(x, (str, Source)) else x for x in args)
    return RawOp(f"aten.{target}", read, (), (out,), (), "")


def program(*ops: RawOp, dtypes: dict[str, str] | None = None) -> RawProgram:
    keys: list[Key] = [BUFFER, WRITTEN, INPUT, WEIGHT, CONSTANT]
    values: dict[Key, Value] = {key: Value((4,), "float32") for key in keys}
    values.update((o.outputs[0], Value((4,), "float32")) for o in ops)
    values.update((key, Value((4,), name)) for key, name in (dtypes or {}).items())
    mutations = [("statistics", ops[-1].outputs[0])]
    found = RawProgram(list(ops), values, [("loss", ops[-1].outputs[0])], mutations)
    found.constants["constant_0"] = torch.zeros(4)
    return found


def test_what_is_the_same_in_every_step() -> None:
    of = program(
        op("cos.default", BUFFER, out="a"),
        op("add.Tensor", "a", CONSTANT, out="b"),
        op("cos.default", WRITTEN, out="c"),
        op("cos.default", WEIGHT, out="d"),
        op("add.Tensor", "b", INPUT, out="e"),
        op("rand_like.default", BUFFER, out="f"),
        op("ones_like.default", INPUT, out="g"),
        op("detach.default", BUFFER, out="h"),
    )
    found = lasting_values(of)
    assert set(found) == {BUFFER, CONSTANT, "a", "b", "g", "h"}
    assert found["h"] == BUFFER and found["a"].kind is SourceKind.CONSTANT
    assert len(set(found.values())) == 5


def test_values_that_are_computed_alike_have_one_name() -> None:
    cast = "_to_copy.default"
    one = program(
        op("cos.default", BUFFER, out="a"),
        op("clone.default", "a", out="b"),
        op(cast, "b", out="c"),
        op("cos.default", "c", out="d"),
        op(cast, "a", out="narrow"),
        dtypes={"narrow": "bfloat16"},
    )
    other = program(op("cos.default", BUFFER, out="x"), op("cos.default", "x", out="y"))
    found, others = lasting_values(one), lasting_values(other)
    assert found["a"] == found["b"] == found["c"] == others["x"]
    assert found["d"] == others["y"] and found["narrow"] not in (found["a"], found["d"])


def test_a_program_takes_them() -> None:
    of = program(
        op("cos.default", BUFFER, out="a"),
        op("sin.default", "a", out="b"),
        op("add.Tensor", "b", INPUT, out="c"),
    )
    found = with_lasting_values(of)
    (added,) = found.ops
    taken = next(iter(added.operands))
    assert taken == lasting_values(of)["b"] and found.values[taken] == Value((4,), "float32")
    assert found.outputs == [("loss", "c")] and found.mutations == [("statistics", "c")]
