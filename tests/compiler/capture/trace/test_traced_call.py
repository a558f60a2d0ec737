"""Which call of a copy is traced."""

import torch
from support.programs.linears import Linears
from torch import Tensor

from meshfold.capture.trace.export import Exported, export_fake
from meshfold.capture.trace.fake_model import fake_copy, flatten_inputs
from meshfold.capture.trace.traced_call import FIRST_CALL, TracedCall
from meshfold.ir.returns import LOSS_ALONE


class Counted(Linears):
    """Multiplies by how often it was called, and keeps what it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.kept = 0, None

    def middle(self, h: Tensor) -> Tensor:
        self.calls += 1
        before, self.kept = self.kept, h.detach()
        return h * self.calls if before is None else h * self.calls + before


def exported(call: TracedCall) -> Exported:
    fake = fake_copy(Counted())
    call.prepare(fake.module)
    inputs = flatten_inputs({"x": torch.randn(8, 4)}, fake.mode)
    return export_fake(fake, inputs, LOSS_ALONE, call=call)


def factors(of: Exported) -> list[object]:
    nodes = of.program.graph.nodes
    return [n.args[1] for n in nodes if n.target is torch.ops.aten.mul.Tensor]


def test_the_last_of_several_calls_is_traced() -> None:
    assert factors(exported(FIRST_CALL)) == [1]
    called = exported(TracedCall(lambda fresh: setattr(fresh, "calls", 4)))
    assert factors(called) == [5] and called.changed["", "calls"] == (4, 5)


def test_what_an_earlier_call_has_left_is_an_input() -> None:
    first = exported(TracedCall(marks_kept=True))
    assert len(first.program.graph_signature.user_outputs) == 2
    second = exported(TracedCall(found=first.kept))
    left = [s for s in second.program.graph_signature.input_specs if s.target == "kept_0"]
    assert len(left) == 1 and isinstance(first.kept["", "kept"], torch.Tensor)
