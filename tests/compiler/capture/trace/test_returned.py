"""The loss of what a model returns: named, found, or refused."""

from typing import Any

import pytest
import torch
from torch import Tensor

from meshfold.capture.trace.loss_function import LossAndOutputs
from meshfold.capture.trace.returned import chosen_outputs, named_total
from meshfold.capture.trace.structures import filled_structure
from meshfold.errors import OptionError
from meshfold.ir.returns import ALL, Returns


def scalar(value: float, trained: bool = True) -> Tensor:
    return torch.tensor(value, requires_grad=trained)


LOGITS = torch.zeros(2, 3, requires_grad=True)


@pytest.mark.parametrize(
    ("returned", "loss"),
    [
        (scalar(1.0), ""),
        (LOGITS, ""),
        ({"loss": scalar(1.0), "aux_loss": scalar(2.0)}, "loss"),
        ((LOGITS, scalar(1.0)), "1"),
        ((scalar(1.0), LOGITS), "0"),
        ((LOGITS, {"inner": scalar(1.0)}), "1.inner"),
        ((scalar(3.0), scalar(0.9, trained=False), LOGITS), "0"),
        ((scalar(3.0, trained=False), LOGITS), "0"),
        ({"logits": LOGITS}, "logits"),
        ({"loss": None, "logits": LOGITS}, "logits"),
        (LossAndOutputs(scalar(1.0), (LOGITS, scalar(2.0))), "loss"),
    ],
)
def test_a_loss_is_found(returned: Any, loss: str) -> None:
    chosen = chosen_outputs(returned, Returns())
    assert [*chosen.tensors] == [loss] and not chosen.no_loss
    assert filled_structure(chosen.structure, chosen.tensors) is chosen.tensors[loss]


def test_losses_are_named_and_added_up() -> None:
    returned = {"losses": {"cls": scalar(1.0), "box": scalar(2.0)}, "logits": LOGITS}
    chosen = chosen_outputs(returned, Returns(("losses.cls", "losses.box"), ALL))
    assert [*chosen.tensors] == [
        "losses.cls + losses.box",
        "losses.cls",
        "losses.box",
        "logits",
    ]
    assert float(chosen.tensors["losses.cls + losses.box"].detach()) == 3.0
    assert float(named_total("losses.cls + losses.box", returned).detach()) == 3.0
    made = filled_structure(chosen.structure, chosen.tensors)
    assert isinstance(made, LossAndOutputs) and made.outputs["logits"] is LOGITS
    assert chosen_outputs(returned, chosen.returns).tensors.keys() == chosen.tensors.keys()


def test_several_scalars_are_refused_by_path() -> None:
    returned = {"losses": {"cls": scalar(1.0), "box": scalar(2.0)}, "logits": LOGITS}
    assert chosen_outputs(returned, Returns()).no_loss == (
        "the model returns several scalars that could be its loss (losses.cls, losses.box); name "
        'one, CompileOptions(loss="losses.cls"), or their sum, loss="losses.cls + losses.box"'
    )
    none = chosen_outputs((LOGITS, LOGITS), Returns()).no_loss
    assert none.startswith("the model returns several tensors (0, 1) and none of them is its loss;")


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        (Returns(("los",)), "returns no tensor at 'los'; name one that it returns: 'loss', 'log"),
        (Returns(("logits",)), r"loss 'logits' is a tensor of torch.float32 and shape \[2, 3\]; a"),
        (Returns((), ("hidden",)), "returns no tensor at 'hidden'"),
    ],
)
def test_paths_that_lead_nowhere_are_refused(returns: Returns, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        chosen_outputs({"loss": scalar(1.0), "logits": LOGITS}, returns)


def test_outputs_are_chosen_by_path_or_by_what_they_are_in() -> None:
    returned = {"loss": scalar(1.0), "states": (LOGITS, LOGITS), "logits": LOGITS}
    chosen = chosen_outputs(returned, Returns((), ("loss", "states")))
    assert [*chosen.tensors] == ["loss", "states.0", "states.1"]
    made = filled_structure(chosen.structure, chosen.tensors)
    assert made.keys() == {"loss", "states"}
    outside = LossAndOutputs(scalar(1.0), {"logits": LOGITS})
    assert [*chosen_outputs(outside, Returns((), ("logits",))).tensors] == [
        "loss",
        "outputs.logits",
    ]
    alone = chosen_outputs(returned, Returns((), ("loss",)))
    assert [*alone.tensors] == ["loss"]
    assert filled_structure(alone.structure, alone.tensors)["loss"] is returned["loss"]


def test_without_a_loss_everything_is_returned() -> None:
    chosen = chosen_outputs((LOGITS, None), Returns(outputs=ALL, has_loss=False))
    assert [*chosen.tensors] == ["0"] and chosen.returns.outputs == ("0",)
    assert filled_structure(chosen.structure, chosen.tensors) == (LOGITS, None)
