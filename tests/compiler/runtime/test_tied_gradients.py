"""Gradients of tied parameters; on processes see test_pipeline_runner.py."""

import pytest
import torch

from meshfold.runtime import tied_gradients
from meshfold.runtime.tied_gradients import TiedGradients


def test_gradients_travel_together_by_dtype_and_a_missing_one_is_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[torch.Tensor] = []

    def all_reduce(flat: torch.Tensor, **_: object) -> None:
        sent.append(flat.clone())
        flat.mul_(2)  # as if another device had the same

    monkeypatch.setattr(tied_gradients.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(tied_gradients, "wait_for", lambda *_: None)
    parameters = {
        name: torch.nn.Parameter(torch.zeros(2, 2, dtype=dtype))
        for name, dtype in (
            ("a", torch.float32),
            ("b", torch.float64),
            ("c", torch.float32),
            ("d", torch.float32),
        )
    }
    parameters["d"].requires_grad_(False)
    parameters["a"].grad = torch.ones(2, 2)
    parameters["b"].grad = torch.full((2, 2), 3.0, dtype=torch.float64)
    TiedGradients(("a", "b", "c", "d"), None).add_up(parameters, None)  # type: ignore[arg-type]
    assert [x.tolist() for x in sent] == [[1.0] * 4 + [0.0] * 8, [3.0] * 4]
    assert parameters["a"].grad.tolist() == [[2.0, 2.0], [2.0, 2.0]]
    assert parameters["b"].grad.tolist() == [[6.0, 6.0], [6.0, 6.0]]
    assert parameters["c"].grad is not None and not parameters["c"].grad.any()
    assert parameters["d"].grad is None, "frozen since"
