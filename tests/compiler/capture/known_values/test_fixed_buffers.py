"""Branches on buffers of one number."""

import copy

import pytest
import torch
from torch import Tensor, nn

import meshfold
from meshfold.capture.known_values.fixed_buffers import (
    choices_of_buffers,
    fix_buffers,
    fixed_buffers_note,
)
from meshfold.capture.pipeline import capture
from meshfold.errors import CaptureError, OptionError


class ActNorm(nn.Module):
    """Takes its scale from the first batch, as flows do."""

    def __init__(self, width: int, dtype: torch.dtype = torch.uint8) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.ones(width))
        self.register_buffer("initialized", torch.tensor(0, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.initialized.item() == 0:
            with torch.no_grad():
                self.shift.data.copy_(-x.mean(0))
                self.scale.data.copy_(1 / (x.std(0) + 1e-6))
                self.initialized.fill_(1)
        return self.scale * (x + self.shift)


class Flow(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.uint8) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 8), ActNorm(8, dtype), nn.BatchNorm1d(8), nn.Linear(8, 8), ActNorm(8)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def flow(dtype: torch.dtype = torch.uint8) -> tuple[Flow, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, batch = Flow(dtype), {"x": torch.randn(16, 4)}
    model(**batch)  # once, to be initialised
    return model, batch


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.float32, torch.int64], ids=str)
def test_the_side_that_an_initialised_model_takes_is_captured(dtype: torch.dtype) -> None:
    model, batch = flow(dtype)
    alone = copy.deepcopy(model)
    compiled = meshfold.compile(model, "local-cpux1", batch)
    note = next(n for n in compiled.plan.notes if n.startswith("forward decides by buffers"))
    assert "layers.1.initialized = 1" in note and "layers.4.initialized = 1" in note
    for made in (alone, compiled):
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
        loss = made(**batch)
        loss.backward()
        optimizer.step()
    assert torch.equal(compiled(**batch), alone(**batch))
    assert [*compiled.state_dict()] == [*alone.state_dict()]
    fewer = {"x": batch["x"][:8]}
    assert torch.equal(compiled(**fewer), alone(**fewer))


def test_a_module_that_has_two_names() -> None:
    model, batch = flow()
    model.again = model.layers
    assert "again.1.initialized" in capture(model, batch).fixed_buffers
    compiled = meshfold.compile(model, "local-cpux1", batch)
    compiled.train_step(batch)


def test_a_step_with_another_value_is_refused() -> None:
    model, batch = flow()
    compiled = meshfold.compile(model, "local-cpux1", batch)
    state = {name: value.clone() for name, value in compiled.state_dict().items()}
    compiled.load_state_dict({**state, "layers.4.initialized": torch.tensor(0, dtype=torch.uint8)})
    with pytest.raises(OptionError, match=r"layers\.4\.initialized is 0, and was 1 when"):
        compiled.train_step(batch)
    compiled.load_state_dict(state)
    compiled.train_step(batch)


def test_a_model_that_would_initialise_itself_is_refused() -> None:
    torch.manual_seed(0)
    with pytest.raises(CaptureError, match="initialises itself in its first call is called once"):
        capture(Flow(), {"x": torch.randn(16, 4)})
    model, batch = flow()
    model.layers[4].initialized.fill_(0)  # one of two layers that are alike
    with pytest.raises(CaptureError, match="a Python branch depends on the value"):
        capture(model, batch)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.layer(x).mean() * (2.0 if self.steps > 3 else 1.0)


def test_a_buffer_that_forward_changes_is_no_constant() -> None:
    with pytest.raises(CaptureError):
        capture(Counting(), {"x": torch.randn(8, 4)})


def test_a_model_that_is_captured_without_has_no_constants() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.register_buffer("scale", torch.tensor(2.0))
    model.forward = lambda x: (model[1](model[0](x)) * model.scale).mean()  # type: ignore[method-assign]
    captured = capture(model, {"x": torch.randn(8, 4)})
    assert not captured.fixed_buffers
    assert "scale" in {b.name for b in captured.graph.buffers}


def test_whole_numbers_come_first_and_counters_of_batch_norms_never() -> None:
    model = Flow()
    model.register_buffer("zero", torch.tensor(0.0), persistent=False)
    model.register_buffer("table", torch.zeros(2))
    model.register_buffer("unknown", torch.zeros((), device="meta"))
    whole, every = choices_of_buffers(model)
    assert [*whole] == ["layers.1.initialized", "layers.4.initialized"]
    assert [*every] == ["zero", *whole]
    assert choices_of_buffers(nn.BatchNorm1d(3)) == []


def test_fixed_buffers_are_constants_of_the_copy() -> None:
    model = Flow()
    fix_buffers(model, {"layers.1.initialized": torch.tensor(1)})
    assert model.layers[1].initialized.dtype == torch.uint8
    assert "layers.1.initialized" not in dict(model.named_buffers())
    assert fixed_buffers_note({}) == ""
    note = fixed_buffers_note({f"b{k}": torch.tensor(k) for k in range(6)})
    assert "b0 = 0, b1 = 1, b2 = 2, b3 = 3 and 2 more; a step" in note
