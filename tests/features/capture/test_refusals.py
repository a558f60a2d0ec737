"""Models that do something else where they are traced: refused in plain words."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import meshfold
from meshfold.capture.pipeline import capture
from meshfold.errors import CaptureError

X = {"x": torch.linspace(-1, 1, 8).reshape(2, 4)}


def test_what_is_missing_where_it_is_traced_is_asked_for() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = None if torch.compiler.is_compiling() else torch.ones(2)
            return (self.linear(x) * mask[:, None]).sum()  # type: ignore[index]

    with pytest.raises(CaptureError, match="'NoneType' object .* pass it in example_inputs") as e:
        capture(Masked(), X)
    assert "test_refusals.py" in e.value.source


class Cropped(nn.Module):
    """Reads numbers that it draws."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.log(torch.tensor((0.5, 2.0)))
        return (self.linear(x) * torch.empty(1).uniform_(scale[0], scale[1]).exp().item()).sum()


def test_a_refusal_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    """torch prints all of the graph that it has so far where a number depends on values."""
    with pytest.raises(CaptureError, match="uniform_ gives a shape or a number that depends on"):
        capture(Cropped(), X)
    assert capfd.readouterr() == ("", "")


class Router(nn.Module):
    """Casts a part of itself to `dtype` while it runs."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.classifier = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.classifier = self.classifier.to(self.dtype)
        return self.classifier(x.to(self.dtype)).sum()


def test_a_module_that_casts_another_while_it_runs_is_refused() -> None:
    reason = r"Linear of float32 is cast to bfloat16 .*; do it before meshfold.compile, or"
    with pytest.raises(CaptureError, match=reason) as e:
        capture(Router(torch.bfloat16), X)
    assert "test_refusals.py" in e.value.source


def test_a_cast_to_the_dtype_that_a_module_has_is_none() -> None:
    captured = capture(Router(torch.float32), X)
    targets = [op.target for region in captured.graph.regions for op in region.graph.ops]
    assert targets == ["aten.linear.default", "aten.sum.default"]


def test_what_a_model_keeps_wide_is_not_cast_under_a_narrow_precision() -> None:
    model = Router(torch.float32)
    with pytest.raises(CaptureError, match="name it in _keep_in_fp32_modules_strict"):
        capture(model, X, precision="bf16")
    model._keep_in_fp32_modules_strict = {"classifier"}  # type: ignore[assignment]
    captured = capture(model, X, precision="bf16")
    assert {p.dtype for p in captured.graph.parameters} == {"float32"}


class Float8(nn.Module):
    """A product of numbers in float8, as torchao makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = (t.detach().to(torch.float8_e4m3fn) for t in (x, self.linear.weight))
        one = torch.ones(())
        product = torch._scaled_mm(left, right.t(), one, one, out_dtype=torch.bfloat16)
        return product.float().mean() + self.linear(x).mean()


def test_float8_is_refused_in_one_line() -> None:
    with pytest.raises(CaptureError, match="float8_e4m3fn, which no plan shards") as e:
        capture(Float8(), {"x": torch.zeros(16, 16)})
    assert "test_refusals.py" in e.value.source and "\n" not in str(e.value)


def test_a_model_without_ops_is_refused() -> None:
    with pytest.raises(CaptureError, match="computes nothing; return a loss"):
        capture(nn.Identity(), {"input": torch.zeros(4)})


def linear_sum_assignment(cost: torch.Tensor) -> Any:
    """Stands in for scipy's, which reads numbers, too."""
    return cost.numpy().argmin(1)


def test_a_loss_that_matches_outside_of_torch_is_to_be_computed_outside() -> None:
    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            return y[linear_sum_assignment(y.detach())].sum()

    with pytest.raises(
        CaptureError, match="capture the model without labels, and compute its loss"
    ):
        capture(Detector(), X)


class Writes(nn.Module):
    """Writes to its input, then computes with it. how: with what."""

    def __init__(self, how: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.how(x)
        return self.linear(x).square().sum()


@pytest.mark.parametrize(
    "how", [lambda x: x.add_(1), lambda x: x.mul_(2).clamp_(0, 1), lambda x: x.copy_(x.flip(0))]
)
def test_what_writes_to_an_input_is_refused_by_its_name(how: Any) -> None:
    with pytest.raises(CaptureError, match=r"the model writes to the input x; .* out of pl") as e:
        capture(Writes(how), {"x": X["x"].clone()})
    assert "test_refusals.py" in e.value.source


def test_an_input_that_is_clamped_in_place_is_captured() -> None:
    captured = capture(Writes(lambda x: x.clamp_(-0.5, 0.5)), {"x": X["x"].clone()})
    (region,) = captured.graph.regions
    assert region.graph.ops[0].target == "aten.clamp.default" and not region.graph.mutations


class Neighbours(nn.Module):
    """A layer of a graph network, with its adjacency as an input or as a buffer."""

    def __init__(self, adjacency: torch.Tensor | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("adjacency", adjacency, persistent=False)

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor | None = None) -> torch.Tensor:
        matrix = self.adjacency if adjacency is None else adjacency
        return torch.sparse.mm(matrix, self.layer(x)).square().sum()


def test_sparse_tensors_are_refused_by_their_names() -> None:
    sparse = torch.eye(2).to_sparse()
    with pytest.raises(
        CaptureError, match="the input adjacency has the layout torch.sparse_coo, .*to_dense"
    ):
        capture(Neighbours(), {**X, "adjacency": sparse})
    with pytest.raises(CaptureError, match="^adjacency has the layout torch.sparse_coo"):
        capture(Neighbours(sparse), X)


class Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = torch.fake_quantize_per_tensor_affine(self.layer.weight, 0.05, 0, -128, 127)
        return nn.functional.linear(x, weight).square().sum()


def test_an_op_that_needs_values_is_refused_when_its_memory_is_counted() -> None:
    with pytest.raises(CaptureError, match="fake_quantize.* has no form without values, by which"):
        meshfold.compile(Quantized(), "local-cpux1", X)


class Sampled(nn.Module):
    """An energy with samples of a chain that goes down its slope: no gradient flows through."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x * 0.5).detach().requires_grad_(True)
        for _ in range(2):
            (slope,) = torch.autograd.grad(self.energy(y).sum(), y)
            y = (y - 0.1 * slope).detach().requires_grad_(True)
        return self.energy(x).mean() - self.energy(y.detach()).mean()


class Repeated(nn.Module):
    """What has no element is repeated, as V-JEPA 2 does with what it does not mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        none = self.layer(x)[:, :0].repeat(1, 2)
        return torch.cat([none, self.layer(x)], 1).square().mean()


@pytest.mark.parametrize("made", [Sampled, Repeated])
def test_what_is_no_obstacle_is_trained(made: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = made()
    compiled = meshfold.compile(copy.deepcopy(model), "local-cpux1", X)
    for one in (model, compiled):
        one(**X).backward()
    for name, parameter in compiled.named_parameters():
        torch.testing.assert_close(parameter.grad, model.get_parameter(name).grad)
