"""What verify compares of a step besides its loss, on one device."""

import pytest
import torch
from support.models.returns import decoder
from torch import nn

from meshfold.api import bind, plan_captured
from meshfold.capture.pipeline import Captured, capture
from meshfold.ir.options import CompileOptions
from meshfold.ir.returns import Returns
from meshfold.models.from_argument import BuiltModel
from meshfold.training.compiled_model import CompiledModel
from meshfold.validation.compared_outputs import loss_in, output_sizes, wide_loss
from meshfold.validation.float64_mode import float64_everywhere


def built(form: str, returns: Returns) -> tuple[BuiltModel, Captured, CompiledModel]:
    model, batch = decoder(form)
    with float64_everywhere():
        captured = capture(model, batch, returns=returns)
        plan = plan_captured(captured, "Decoder", "local-cpux1", CompileOptions())
        return BuiltModel(model, batch), captured, bind(model, plan, captured, batch)


def test_outputs_are_compared_by_path() -> None:
    made, captured, compiled = built("record", Returns(outputs="all"))
    with float64_everywhere():
        sizes = output_sizes(made, captured, compiled)
        assert sizes.keys() == {"logits", "hidden.0", "hidden.1", "hidden.2"}
        assert all(size > 0 and wrong < 1e-14 for size, wrong in sizes.values())
        with torch.no_grad():
            compiled.get_parameter("head.weight")[0, 0] += 1e-3
        with pytest.warns(UserWarning, match=r"are those from before meshfold\.compile"):
            wrong = output_sizes(made, captured, compiled)
    assert wrong["logits"][1] > 1e-6 and wrong["hidden.2"][1] < 1e-14
    assert compiled.num_forwards == 0


def test_a_lone_loss_has_no_outputs_and_is_found_in_any_structure() -> None:
    made, captured, compiled = built("tuple", Returns())
    assert output_sizes(made, captured, compiled) == {}
    with float64_everywhere():
        loss = compiled(**made.example_inputs)
    assert loss_in(captured, loss) is loss
    summed = Returns(("losses.cls", "losses.size"), "all")
    made, captured, compiled = built("losses", summed)
    with float64_everywhere():
        returned = compiled(**made.example_inputs)
    assert loss_in(captured, returned) is returned.loss


def test_a_criterion_is_widened() -> None:
    criterion = nn.CrossEntropyLoss(weight=torch.ones(3))
    assert wide_loss(criterion).weight.dtype == torch.float64
    assert criterion.weight.dtype == torch.float32
    assert wide_loss(max) is max
