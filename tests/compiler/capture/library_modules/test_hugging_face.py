"""Models of Hugging Face inside other modules are set as they are alone."""

import copy

import pytest
from support.models.hard_to_verify import Trainer
from support.models.hugging_face import tiny_model
from torch import nn

from meshfold.capture.library_modules.hugging_face import hugging_face_models, run_experts_as
from meshfold.capture.pipeline import capture


def test_the_outermost_models_are_found() -> None:
    model, _ = tiny_model("mixtral")
    assert list(hugging_face_models(model)) == [model]
    assert list(hugging_face_models(Trainer(model))) == [model]
    assert list(hugging_face_models(nn.Linear(2, 2))) == []


@pytest.mark.parametrize("chosen", ["eager", "grouped_mm"])
def test_experts_of_a_wrapped_model_are_captured(chosen: str) -> None:
    """The loop over experts was refused: only the configuration of the model itself was set."""
    model, batch = tiny_model("mixtral")
    model.config._experts_implementation = chosen
    model.config.use_cache = True
    alone, wrapped = capture(model, batch), capture(Trainer(model), batch)
    assert wrapped.graph.notes == alone.graph.notes
    assert wrapped.graph.num_ops == alone.graph.num_ops
    assert model.config._experts_implementation == chosen and model.config.use_cache


def test_what_experts_ran_as_before_is_told_once() -> None:
    model, _ = tiny_model("mixtral")
    model.config._experts_implementation = "grouped_mm"
    both = nn.ModuleList([model, tiny_model("mixtral")[0], tiny_model("llama")[0]])
    assert "grouped_mm" in run_experts_as(both, "eager")
    assert model.config._experts_implementation == "eager"
    assert run_experts_as(both, "eager") == ()


class Composite(nn.Module):
    """A model of models that cannot say how experts run, of which one can, as Dots3's with images
    and text."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.config = inner.config
        self.inner = inner

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return False


def test_experts_of_a_part_are_set_where_the_whole_cannot() -> None:
    model, _ = tiny_model("mixtral")
    model.config._experts_implementation = "grouped_mm"
    assert run_experts_as(Composite(model), "eager") == ("grouped_mm",)
    assert model.config._experts_implementation == "eager"


def test_experts_with_a_configuration_of_their_own_are_set() -> None:
    """As those of Dots3 have."""
    model, _ = tiny_model("mixtral")
    run_experts_as(model, "eager")
    (experts, *_) = [m for m in model.modules() if "is_concatenated" in vars(m)]
    experts.config = copy.deepcopy(model.config)
    experts.config._experts_implementation = "grouped_mm"
    assert run_experts_as(model, "eager") == ("grouped_mm",)
    assert experts.config._experts_implementation == "eager"
