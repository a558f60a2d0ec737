"""Indices that name every row in order are no indices; and those that stay."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from meshfold.capture.pipeline import capture
from meshfold.capture.rewrites.ordered_indices import INDEX
from meshfold.ops.reference_interpreter import run_graph

ROWS, COLUMNS, WIDTH = 3, 5, 4
Select = Callable[[Tensor, Tensor], Tensor]


class Indexed(nn.Module):
    """What functions select of x [3, 5, 4]; ids [3, 2] are columns, some from behind."""

    def __init__(self, *selects: Select) -> None:
        super().__init__()
        self.selects = selects
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        selected = [select(x * self.scale, ids) for select in self.selects]
        return sum((y * torch.arange(y.numel()).view(y.shape).cos()).sum() for y in selected)


def line(size: int, *after: None) -> Tensor:
    return torch.arange(size)[(slice(None), *after)]


ORDERED: dict[str, Select] = {
    "as masks of transformers": lambda x, _: x[line(ROWS, None, None, None), line(COLUMNS)],
    "all dims": lambda x, _: x[line(ROWS, None, None), line(COLUMNS, None), line(WIDTH)],
    "permuted": lambda x, _: x[line(ROWS), line(COLUMNS, None)],
    "a dim in the middle": lambda x, _: x[:, line(COLUMNS)],
    "apart": lambda x, _: x[line(ROWS, None), :, line(WIDTH)],
    "of one row": lambda x, _: x[:1][line(1, None), line(COLUMNS)],
    "one column per row": lambda x, ids: x[line(ROWS), ids[:, 0]],
    "columns per row": lambda x, ids: x[line(ROWS, None), ids],
    "of all rows": lambda x, ids: x[line(ROWS, None), ids[0]],
    "of the last dim": lambda x, ids: x[line(ROWS, None), line(COLUMNS), ids[:, :1] % WIDTH],
    "the diagonal": lambda x, _: x[line(ROWS), line(ROWS)],
}
OTHERS: dict[str, Select] = {
    "columns": lambda x, ids: x[:, ids[0]],
    "not from 0": lambda x, _: x[line(ROWS - 1) + 1],
    "backwards": lambda x, _: x[line(ROWS).flip(0)],
    "some rows": lambda x, ids: x[line(ROWS - 1), ids[:-1, 0]],
}


@pytest.mark.parametrize(("selects", "num_indices"), [(ORDERED, 0), (OTHERS, len(OTHERS))])
def test_rows_in_order_are_no_index(selects: dict[str, Select], num_indices: int) -> None:
    model = Indexed(*selects.values())
    x = torch.randn(ROWS, COLUMNS, WIDTH, dtype=torch.float64)
    batch = {"x": x, "ids": torch.tensor([[1, -1], [4, 0], [-5, 2]])}
    found = capture(model, batch)
    parameters = dict(model.named_parameters())
    (made,) = run_graph(found.graph, parameters, {}, found.constants, batch).values()
    expected = model(**batch)
    torch.testing.assert_close(made, expected, rtol=1e-14, atol=1e-14)
    gradients = [torch.autograd.grad(y, model.scale)[0] for y in (made, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-14, atol=1e-14)
    targets = [op.target for region in found.graph.regions for op in region.graph.ops]
    assert targets.count(INDEX) == num_indices


def test_a_column_that_is_not_there_is_an_error_as_in_one_process() -> None:
    model = Indexed(ORDERED["one column per row"])
    x = torch.randn(ROWS, COLUMNS, WIDTH, dtype=torch.float64)
    found = capture(model, {"x": x, "ids": torch.zeros(ROWS, 2, dtype=torch.long)})
    batch = {"x": x, "ids": torch.full((ROWS, 2), COLUMNS)}
    parameters = dict(model.named_parameters())
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        run_graph(found.graph, parameters, {}, found.constants, batch)
