"""Dropout is probed as a program runs it, not as torch would."""

import pytest
import torch
from torch import Tensor

from meshfold.cost_models.memory.op_memory import OpProbe, ProbeKey, dense_spec
from meshfold.ir.op_graph import Ref
from meshfold.memory_probe.dropout import emitted_dropout
from meshfold.memory_probe.prober import OpProber, StorageCounter
from meshfold.passes.graph.without_dropout import ATTENTION

SHAPE = (2, 4, 32, 16)
SCORES = 2 * 4 * 32 * 32


def attention_probe(probability: float) -> OpProbe:
    operands = (dense_spec(SHAPE, "float32", True),) * 3
    args = (Ref(0), Ref(1), Ref(2), None, probability, True)
    return OpProber()(ProbeKey(ATTENTION, args, (), operands))


def test_attention_that_drops_weights_keeps_them_whole() -> None:
    plain, dropping = attention_probe(0.0), attention_probe(0.1)
    # The softmax and the dropped weights in float32, the mask in one byte.
    assert dropping.saved_bytes >= (4 + 4 + 1) * SCORES > plain.saved_bytes
    assert dropping.saved_bytes <= 1.1 * (4 + 4 + 1) * SCORES
    # Parts of the mask are hashed one after the other, beside scores and weights.
    assert dropping.forward_scratch_bytes <= 20 * SCORES


@pytest.mark.parametrize("target", ["aten.dropout.default", "aten.native_dropout.default"])
def test_a_dropout_makes_its_mask_in_parts(target: str) -> None:
    size = 2**16
    function = emitted_dropout(target, torch.device("cpu"))
    assert function is not None
    x = torch.ones(64, 1024, requires_grad=True)
    with StorageCounter([x]) as counter:
        found = function(x, 0.5, True)
    result: Tensor = found[0] if isinstance(found, tuple) else found
    assert 0.45 < float((result == 2.0).float().mean()) < 0.55
    # Mask and an eighth of what hashes it; then mask, product and result.
    assert counter.peak_bytes <= (1 + 8) * size + 64
    for off in ((0.0, True), (0.5, False)):
        assert torch.equal(
            function(x, *off)[0]
            if target.endswith("native_dropout.default")
            else function(x, *off),
            x,
        )


def test_other_ops_are_as_they_are() -> None:
    assert emitted_dropout("aten.linear.default", torch.device("cpu")) is None
