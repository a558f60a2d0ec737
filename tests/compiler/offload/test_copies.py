"""Which copies a device has, and in which pages they come."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.programs.local_programs import emit_uniform, stack_model

from meshfold.capture.pipeline import capture
from meshfold.ir.strategy import UniformStrategy
from meshfold.offload.copies import DeviceCopy, device_copies, pages


@pytest.mark.parametrize("precision", ["model", "bf16"])
def test_a_copy_is_in_the_dtype_that_its_only_use_reads(precision) -> None:
    model, batch = stack_model(2)
    model, batch = model.float(), {name: x.float() for name, x in batch.items()}
    captured = capture(model, batch, precision=precision)
    program = emit_uniform(captured, UniformStrategy(), 4)
    names = ["layers.1.up.weight", "layers.0.down.bias"]
    found = device_copies([program], names, ["layers.1.up.weight"])
    narrow = torch.float32 if precision == "model" else torch.bfloat16
    # In the order of their first use. What other stages hold is summed up as it is stored.
    assert found == [
        DeviceCopy("layers.0.down.bias", narrow),
        DeviceCopy("layers.1.up.weight", torch.float32, has_one_use=False, is_shared=True),
    ]


@given(st.lists(st.integers(1, 100), max_size=20), st.integers(1, 100))
def test_pages_hold_every_parameter_once_and_no_more_than_a_page(sizes, page_bytes) -> None:
    named = {str(k): size for k, size in enumerate(sizes)}
    found = pages(named, page_bytes)
    assert [name for page in found for name in page] == list(named)
    assert all(len(p) == 1 or sum(named[n] for n in p) <= page_bytes for p in found)
    # As few as there can be in this order.
    assert all(
        sum(map(named.get, a)) + named[b[0]] > page_bytes
        for a, b in zip(found, found[1:], strict=False)
    )
