"""Calls of torch that a trace would lose: refused, in one line."""

import pytest
import torch
from support.programs.linears import (
    Linears,
    Middle,
    assert_refused,
    assert_trains_alike,
    captured_line,
    with_middle,
)
from support.programs.local_programs import emit_uniform, errors_of_a_step
from torch import Tensor

from meshfold.capture.pipeline import capture
from meshfold.ir.strategy import UniformStrategy
from meshfold.validation.float64_mode import float64_everywhere


def hooked(model: Linears, h: Tensor) -> Tensor:
    h.register_hook(lambda g: 2 * g)
    return h


def backward_inside(model: Linears, h: Tensor) -> Tensor:
    h.sum().backward(retain_graph=True)
    return h


def backward_by_function(model: Linears, h: Tensor) -> Tensor:
    torch.autograd.backward([model.first.weight.sum()])
    return h


def backward_to_a_leaf(model: Linears, h: Tensor) -> Tensor:
    leaf = h.detach().requires_grad_()
    torch.autograd.backward([leaf.square().sum()])
    return h + leaf.grad


def gradient_set(model: Linears, h: Tensor) -> Tensor:
    model.first.weight.grad = torch.ones_like(model.first.weight)
    return h


def gradients_cleared(model: Linears, h: Tensor) -> Tensor:
    model.zero_grad()
    return h


def data_read_for_a_norm(model: Linears, h: Tensor) -> Tensor:
    return h / h.data.norm() + model.first.weight.data.sum()


def data_written_to(model: Linears, h: Tensor) -> Tensor:
    h.data.mul_(2)
    return h


def read_data_written_to(model: Linears, h: Tensor) -> Tensor:
    copied = h.clone()
    data = copied.data
    copied.add_(1)
    return h + data


def data_written(model: Linears, h: Tensor) -> Tensor:
    model.first.weight.data = model.first.weight * 0.5
    return h


def buffer_written_by_data(model: Linears, h: Tensor) -> Tensor:
    """As codebooks are averaged, and centers."""
    found = h - model.factor
    model.history.data.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
    model.factor.data.copy_(model.history[0])
    model.factor.data += 1
    nearest = (h @ model.factor.unsqueeze(1)).argmax()
    return found * nearest


def buffer_written_before(model: Linears, h: Tensor) -> Tensor:
    model.factor.data.mul_(1.1)
    return h * model.factor


def buffer_of_a_backward(model: Linears, h: Tensor) -> Tensor:
    h = h * model.factor
    model.factor.data.mul_(2)
    return h


def view_of_a_backward(model: Linears, h: Tensor) -> Tensor:
    h = h * model.history[0]
    model.history.data.fill_(2)
    return h


def buffer_set_by_data(model: Linears, h: Tensor) -> Tensor:
    model.factor.data = h.detach().mean(0)
    return h + model.factor


def gradient_inside(model: Linears, h: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(h.square().sum(), h, create_graph=True)
    return h + gradient


def gradient_retained(model: Linears, h: Tensor) -> Tensor:
    h.retain_grad()
    return h


def parameter_frozen_for_a_call(model: Linears, h: Tensor) -> Tensor:
    model.last.weight.requires_grad_(False)
    h = model.last(h)
    model.last.weight.requires_grad = True
    return h


def layer_frozen(model: Linears, h: Tensor) -> Tensor:
    model.first.requires_grad_(False)
    return h


def layer_trained(model: Linears, h: Tensor) -> Tensor:
    model.first.requires_grad_(True)
    return h


def kept_otherwise(model: Linears, h: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.half(), lambda x: x.float()):
        return h * h


def kept_on_the_host(model: Linears, h: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return h * h


def written_by_detach(model: Linears, h: Tensor) -> Tensor:
    h = model.first(h)
    h.detach()[:, 0] = 0
    return 2 * h


def read_by_detach(model: Linears, h: Tensor) -> Tensor:
    found = torch.empty_like(h)
    torch.mul(h.detach(), 2, out=found)
    return h + found


def written_alone(model: Linears, h: Tensor) -> Tensor:
    found = h.detach().add_(1)
    return model.first(found) * found


def in_inference_mode(model: Linears, h: Tensor) -> Tensor:
    with torch.inference_mode():
        doubled = 2 * h
    return h + doubled.clone()


MIDDLES = {
    hooked: "Tensor.register_hook inside of forward is lost in a graph; .*test_lost_calls.py",
    backward_inside: "Tensor.backward inside of forward is lost in a graph",
    backward_by_function: "forward writes to .grad of first.weight, by torch.autograd.backward",
    backward_to_a_leaf: "forward writes to .grad of a tensor, by torch.autograd.backward",
    gradient_set: "forward writes to .grad of first.weight, by .* or itself",
    gradients_cleared: "",
    data_read_for_a_norm: "",
    data_written_to: "a write to the memory of Tensor.data inside of forward is lost in a graph",
    read_data_written_to: "a write to the memory of Tensor.data .*test_lost_calls.py",
    data_written: "Tensor.data = inside of forward is lost in a graph; compute a new tensor",
    buffer_of_a_backward: "Tensor.data changes what the backward of an op .*test_lost_calls.py",
    view_of_a_backward: "Tensor.data changes what the backward of an op",
    buffer_set_by_data: "",
    gradient_inside: "",
    gradient_retained: "",
    parameter_frozen_for_a_call: "forward sets requires_grad of a parameter to False, which a",
    layer_frozen: "requires_grad .* to False, .*; freeze it before .*test_lost_calls.py",
    layer_trained: "",
    kept_otherwise: "saved_tensors_hooks inside of forward are lost .*test_lost_calls.py",
    kept_on_the_host: "",
    written_by_detach: "aten.fill_.Tensor changes, through detach.*; write it out of place .*py",
    read_by_detach: "",
    written_alone: "",
    in_inference_mode: "what torch.inference_mode keeps from the gradient is lost in a graph",
}


@pytest.mark.parametrize("middle", MIDDLES, ids=lambda f: f.__name__)
def test_a_call_is_captured_or_refused(middle: Middle) -> None:
    assert_refused(with_middle(Linears, middle), MIDDLES[middle])


@pytest.mark.parametrize(
    "middle", [buffer_written_by_data, buffer_written_before, buffer_set_by_data]
)
def test_buffers_are_written_by_their_data(middle: Middle) -> None:
    assert_trains_alike(with_middle(Linears, middle))


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_are_refused_by_name(register: str) -> None:
    model = Linears()
    getattr(model.first.weight, register)(lambda x: None)
    assert captured_line(model).startswith("first.weight has hooks of its gradient")


@pytest.mark.parametrize("register", ["full_backward_hook", "full_backward_pre_hook"])
def test_hooks_of_a_backward_are_refused_by_name(register: str) -> None:
    model = Linears()
    getattr(model.last, f"register_{register}")(lambda *_: None)
    assert captured_line(model).startswith("last has hooks of its backward, which would not run")


def test_data_is_a_tensor_without_a_gradient() -> None:
    torch.manual_seed(0)
    model, batch = (
        with_middle(Linears, data_read_for_a_norm).double(),
        {"x": torch.randn(8, 4, dtype=torch.float64)},
    )
    with float64_everywhere():
        captured = capture(model, batch)
    program = emit_uniform(captured, UniformStrategy(dp=2), 8)
    for errors in errors_of_a_step(model, batch, captured, program):
        assert max(errors.values()) < 1e-12
