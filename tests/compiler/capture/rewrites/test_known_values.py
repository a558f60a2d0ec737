"""What a program computes from constants alone, and what it does not."""

from collections.abc import Mapping

import torch
from torch import Tensor

from meshfold.capture.rewrites.known_values import computed, known_values
from meshfold.capture.trace.raw_program import Key, Operand, RawOp, RawProgram
from meshfold.ir.op_graph import Source, SourceKind, Value


def op(target: str, output: str, *args: object) -> RawOp:
    return RawOp(f"aten.{target}", args, (), (output,), (), "")


def numbers(made: RawOp, _: RawProgram, known: Mapping[Key, Tensor]) -> Tensor | None:
    return computed(made, known)


def test_numbers_follow_from_constants_alone() -> None:
    table, given = Source(SourceKind.CONSTANT, "table"), Source(SourceKind.INPUT, "x")
    ops = [
        op("arange.default", "line", 3),
        op("add.Tensor", "moved", Operand("line"), Operand(table)),
        op("add.Tensor", "of the batch", Operand("line"), Operand(given)),
        op("bernoulli.default", "drawn", Operand(table)),
        op("neg.default", "not asked for", Operand("line")),
    ]
    values = {o.outputs[0]: Value((3,), "int64") for o in ops}
    program = RawProgram(ops, values, constants={"table": torch.ones(3)})
    known = known_values(program, ["moved", "of the batch", "drawn"], numbers)
    assert torch.equal(known["moved"], torch.tensor([1.0, 2.0, 3.0]))
    assert not {"of the batch", "drawn", "not asked for", "line"} & known.keys()
