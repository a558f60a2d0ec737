"""Facts of tensors give tensors with these facts."""

import torch

from meshfold.capture.trace.tensor_facts import empty_results, tensor_facts


def test_strides_are_kept() -> None:
    tensors = [torch.ones(2, 3).T, torch.zeros(4, dtype=torch.bfloat16)]
    facts = [tensor_facts(t) for t in tensors]
    assert facts == [((3, 2), (1, 3), "float32"), ((4,), (1,), "bfloat16")]
    assert [tensor_facts(t) for t in empty_results(facts)] == facts
