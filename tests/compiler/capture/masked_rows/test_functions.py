"""The tables name functions that torch has."""

import torch
from torch import Tensor
from torch.nn import functional

from meshfold.capture.masked_rows.functions import (
    ALONG_DIMS,
    CLASS_LOSSES,
    ELEMENTWISE,
    LOSSES,
    OF_LAST_DIMS,
    name_of,
)


def test_every_name_is_of_a_function_of_torch() -> None:
    for name in (*ELEMENTWISE, *ALONG_DIMS, *OF_LAST_DIMS):
        places = (torch, Tensor, functional)
        assert any(hasattr(p, n) for p in places for n in (name, f"__{name}__")), name
    assert all(hasattr(functional, name) for name in (*LOSSES, *CLASS_LOSSES))


def test_a_function_has_one_name_however_it_is_called() -> None:
    assert {name_of(f) for f in (torch.relu, Tensor.relu, functional.relu)} == {"relu"}
    assert name_of(Tensor.__add__) == name_of(torch.add) == "add"
