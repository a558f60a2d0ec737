"""Names of dtypes are those of safetensors."""

import torch
from safetensors.torch import _TYPES

from meshfold.checkpoint_files.dtypes import DTYPES, NAMES


def test_every_name_is_that_of_safetensors() -> None:
    known = {name: dtype for name, dtype in _TYPES.items() if name in DTYPES}
    assert known == {name: d for name, d in DTYPES.items() if d is not torch.complex128}
    assert len(NAMES) == len(DTYPES)
