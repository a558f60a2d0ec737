"""Names that torch.export cannot write."""

import pytest
import torch
from support.models.hard_to_verify import odd_names
from torch import nn

from meshfold.capture.pipeline import capture
from meshfold.errors import CaptureError


class Named(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({name: nn.Linear(4, 4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (layer,) = self.inner.values()
        return layer(x).sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["lambda", "None", "class", "a\nb"])
def test_a_name_that_is_no_code_is_refused(name: str) -> None:
    with pytest.raises(CaptureError, match="in its name, which torch.export cannot") as caught:
        capture(Named(name), {"x": torch.randn(2, 4)})
    assert caught.value.op == f"inner.{name}.weight"
    assert "\n" not in str(caught.value)


def test_other_odd_names_are_captured() -> None:
    assert capture(*odd_names()).graph.num_ops > 10


def test_a_parameter_that_is_not_made_yet_is_refused() -> None:
    lazy = nn.Sequential(nn.LazyLinear(4), nn.Flatten(0), nn.Linear(8, 1))
    with pytest.raises(CaptureError, match="run the model once") as caught:
        capture(lazy, {"input": torch.randn(2, 4)})
    assert caught.value.op == "0.weight"
    lazy(torch.randn(2, 4))
    assert capture(lazy, {"input": torch.randn(2, 4)}).graph.num_ops > 1


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_modules_of_torch_script_are_refused_where_they_have_parameters() -> None:
    def built(last: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Flatten(0), torch.jit.script(last))

    with pytest.raises(CaptureError, match=r"^2 is a module of TorchScript, .* made of"):
        capture(built(nn.Linear(8, 1)), {"input": torch.randn(2, 4)})
    assert capture(built(nn.GELU()), {"input": torch.randn(2, 4)}).graph.num_ops > 1
