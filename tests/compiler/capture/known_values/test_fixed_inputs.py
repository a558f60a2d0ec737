"""Inputs whose values are the same in every batch."""

import pytest
import torch
from torch import Tensor, nn

import meshfold
from meshfold.capture.known_values.fixed_inputs import (
    fixed_by,
    fixed_inputs,
    fixed_note,
    graph_structure,
)
from meshfold.capture.pipeline import capture
from meshfold.errors import CaptureError, OptionError

GRID = torch.tensor([[2, 3], [1, 6]])


class Patches(nn.Module):
    """Means of patches per image, whose numbers of patches are in `grid`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        parts = x.split(grid.prod(-1).tolist())
        return sum((part * self.weight).mean() for part in parts)  # type: ignore[return-value]


def _batch(grid: Tensor = GRID) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"x": torch.randn(12, 4), "grid": grid}


def test_they_are_those_of_the_names_and_those_that_always_are() -> None:
    batch = {"image_grid_thw": GRID, "images": {"sizes": GRID}, "x": torch.ones(2)}
    found = fixed_inputs(batch, ["images.sizes"])
    assert list(found) == ["image_grid_thw", "images.sizes"]
    assert found["images.sizes"] is not GRID
    assert not fixed_inputs({"image_sizes": GRID.to("meta")}, [])


@pytest.mark.parametrize(
    ("named", "text"),
    [("y", "no tensor of the batch"), ("x", "float32"), ("meta", "has no values")],
)
def test_what_cannot_be_fixed_is_refused(named: str, text: str) -> None:
    meta = torch.ones(1, dtype=torch.int64, device="meta")
    with pytest.raises(OptionError, match=text):
        fixed_inputs({"x": torch.ones(2), "meta": meta}, [named])


def test_an_input_that_is_not_fixed_decides_no_shape() -> None:
    with pytest.raises(CaptureError, match="depends on values"):
        capture(Patches(), _batch())


def test_a_fixed_input_is_a_constant_and_a_note() -> None:
    captured = capture(Patches(), _batch(), fixed_inputs=["grid"])
    assert [info.name for info in captured.graph.inputs] == ["x"]
    assert torch.equal(captured.fixed["grid"], GRID)
    assert fixed_note("grid", GRID) in captured.graph.notes
    assert "[[2, 3], [1, 6]] in every batch" in fixed_note("grid", GRID)
    assert "16 numbers of the example" in fixed_note("grid", torch.ones(16))


def test_a_step_has_the_values_of_the_example_or_is_refused() -> None:
    model, options = Patches(), meshfold.CompileOptions(fixed_inputs=("grid",), precision="model")
    compiled = meshfold.compile(model, "local-cpux1", _batch(), options=options)
    assert torch.equal(compiled(**_batch()), Patches()(**_batch()))
    with pytest.raises(OptionError, match="grid is a fixed input, and has other values"):
        compiled(**_batch(GRID.flip(0)))
    with pytest.raises(OptionError, match="has no grid, which is a fixed input"):
        compiled(x=_batch()["x"])


def test_a_plan_says_which_inputs_are_fixed() -> None:
    options = meshfold.CompileOptions(fixed_inputs=("grid",), precision="model")
    plan = meshfold.find_plan(Patches(), "local-cpux1", _batch(), options=options)
    assert fixed_by(plan, _batch()) == ("grid",)
    compiled = meshfold.compile(Patches(), "local-cpux1", _batch(), plan=plan)
    assert compiled(**_batch()).isfinite()


def test_names_are_no_text() -> None:
    with pytest.raises(OptionError, match="write a tuple of names"):
        meshfold.CompileOptions(fixed_inputs="grid")  # type: ignore[arg-type]


class WithoutLoops(nn.Module):
    """A graph convolution that leaves out edges from a node to itself and has one of each, as GCN
    does; of means per graph where `batch` says which one a node is of."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        edges = edge_index[:, edge_index[0] != edge_index[1]]
        loops = torch.arange(len(x)).expand(2, -1)
        source, target = torch.cat([edges, loops], 1)
        x = torch.zeros_like(x).index_add(0, target, self.layer(x)[source])
        return x.new_zeros(int(batch.max()) + 1, 4).index_add(0, batch, x).square().mean()


def test_the_structure_of_a_graph_is_fixed_where_shapes_depend_on_it() -> None:
    batch = {
        "x": torch.randn(4, 4),
        "edge_index": torch.tensor([[0, 1, 2, 2], [1, 1, 0, 3]]),
        "batch": torch.tensor([0, 0, 1, 1]),
    }
    assert graph_structure(batch, ["batch"]) == ("edge_index",)
    captured = capture(WithoutLoops(), batch)
    assert list(captured.fixed) == ["edge_index", "batch"]
    assert [info.name for info in captured.graph.inputs] == ["x"]
    plan = meshfold.find_plan(WithoutLoops(), "local-cpux1", batch)
    assert fixed_by(plan, batch) == ("edge_index", "batch")


def test_ids_called_batch_are_no_graph() -> None:
    assert not graph_structure({"batch": torch.ones(2, 3, dtype=torch.int64)}, [])
    with pytest.raises(CaptureError, match="name integer inputs that are the same in every batch"):
        capture(Patches(), {"x": torch.randn(12, 4), "grid": GRID})
