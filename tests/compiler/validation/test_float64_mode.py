"""float64_everywhere: casts to narrower floats give float64, everything else is left alone."""

import pytest
import torch
from support.models import hugging_face
from torch import nn

from meshfold.validation.float64_mode import float64_everywhere, in_float64

X = torch.ones(3, dtype=torch.float64)


@pytest.mark.parametrize("narrow", [torch.float32, torch.float16, torch.bfloat16])
def test_casts_stay_wide(narrow: torch.dtype) -> None:
    with float64_everywhere():
        found = [
            X.float(),
            X.half(),
            X.bfloat16(),
            X.to(narrow),
            X.to(dtype=narrow),
            X.to("cpu", narrow),
            X.sum(dtype=narrow),
            torch.softmax(X, -1, dtype=narrow),
            torch.zeros(3, dtype=narrow),
            torch.arange(3).to(narrow),
            torch.ones(3),
        ]
    assert {t.dtype for t in found} == {torch.float64}


def test_complex_numbers_have_parts_in_float64() -> None:
    with float64_everywhere():
        assert torch.zeros(2, dtype=torch.complex64).dtype is torch.complex128
    model = nn.Linear(2, 2)
    model.phases = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    model.register_buffer("turns", torch.ones(2, dtype=torch.complex64))
    assert in_float64(model) is model
    assert model.weight.dtype is torch.float64
    assert model.phases.dtype is model.turns.dtype is torch.complex128
    assert isinstance(model.phases, nn.Parameter)


def test_other_dtypes_are_left_alone() -> None:
    with float64_everywhere():
        assert X.to(torch.int32).dtype is torch.int32
        assert X.bool().dtype is torch.bool


def test_everything_is_as_before_afterwards() -> None:
    with pytest.raises(ZeroDivisionError), float64_everywhere():
        _ = 1 / 0
    assert torch.get_default_dtype() is torch.float32
    assert X.float().dtype is torch.float32


@pytest.mark.parametrize("family", hugging_face.FAMILIES)
def test_losses_of_models_are_float64(family: str) -> None:
    model, inputs = hugging_face.tiny_model(family, layers=1)
    seen = set()
    for module in model.modules():
        if isinstance(module, nn.LayerNorm | nn.Linear):
            module.register_forward_hook(lambda m, args, out: seen.add(out.dtype))
    with float64_everywhere():
        loss = model(**inputs).loss
    assert loss.dtype is torch.float64
    assert seen == {torch.float64}
