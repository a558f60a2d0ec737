"""Batches of another size than the captured one: run right, or refused in one line."""

from collections.abc import Mapping

import pytest
import torch
from support.models.hugging_face import tiny_model
from support.processes.batch_sizes import batch_of
from support.processes.pool import Pools
from support.programs.local_programs import stack_model
from torch import Tensor, nn

import meshfold
from meshfold.errors import OptionError
from meshfold.ir.options import CompileOptions, PinValue
from meshfold.validation.float64_mode import float64_everywhere


def test_other_batches_and_sequences_on_one_device() -> None:
    with float64_everywhere():
        model, _ = tiny_model("llama")
        compiled = meshfold.compile(model, "local-cpux1", batch_of(4, 8))
        for rows, sequence in ((4, 8), (3, 8), (2, 5), (4, 8)):
            batch = batch_of(rows, sequence)
            assert torch.allclose(compiled(**batch), model(**batch).loss, rtol=0, atol=1e-13)
    # A program per size that came, the captured one included.
    assert len(compiled._runners) == 3


def test_the_model_need_not_live_on() -> None:
    model, batch = stack_model(2)
    compiled = meshfold.compile(model, "local-cpux1", batch)
    small = {name: x[:1] for name, x in batch.items()}
    expected = model(**small)
    for parameter in model.parameters():
        parameter.data = torch.empty(0)
    assert torch.allclose(compiled(**small), expected)


class Sized(nn.Module):
    """Does something else with one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return (y if len(x) > 1 else y.tanh()).square().mean()


def test_a_model_that_does_something_else_with_this_size_is_refused() -> None:
    compiled = meshfold.compile(Sized(), "local-cpux1", {"x": torch.randn(4, 4)})
    assert compiled(x=torch.randn(2, 4)).isfinite()
    with pytest.raises(
        OptionError,
        match=r"a batch of x \[1, 4\] does not run under a plan for x \[4, 4\]: with this size the "
        r"model does aten.tanh.default for aten.square.default; drop it \(drop_last=True\), fill",
    ):
        compiled(x=torch.randn(1, 4))


def test_microbatches_must_divide_it() -> None:
    model, batch = stack_model(2)
    options = CompileOptions(pins={"microbatches": 2})
    compiled = meshfold.compile(model, "local-cpux1", batch, options=options)
    small = {name: x[:2] for name, x in batch.items()}
    assert torch.allclose(compiled.train_step(small), model(**small))
    odd = {name: x[:3] for name, x in batch.items()}
    with pytest.raises(OptionError, match="3 samples do not divide over the 2 parts of one device"):
        compiled.train_step(odd)


@pytest.mark.multiprocess
@pytest.mark.parametrize("in_parts", [False, True])
def test_a_batch_that_has_the_rows_of_a_slice(pools: Pools, in_parts: bool) -> None:
    """A smaller global batch, and those after it, are no slices of a larger one, which differ."""
    sizes = [(8, 2), (4, 2), (6, 2), (8, 2), (4, 2), (2, 2)]
    pins = {"dp": 2, "tp": 1}
    args = ("support.processes.batch_sizes:errors", "summed", pins, sizes, in_parts)
    for of_rank in pools.run(2, *args):
        assert max(of_rank) < 1e-12


@pytest.mark.slow
@pytest.mark.multiprocess
def test_what_data_parallel_ranks_divide_is_run_right(pools: Pools) -> None:
    pins = {"dp": 2, "tp": 1, "zero": 3}
    sizes = [(8, 8), (4, 8), (2, 8), (6, 6), (8, 8)]
    for of_rank in pools.run(
        2, "support.processes.batch_sizes:errors", "llama", pins, sizes, False
    ):
        assert max(of_rank) < 1e-13
    # Its own part of the last batch on every rank, as after its parts of others.
    for of_rank in pools.run(2, "support.processes.batch_sizes:errors", "llama", pins, sizes, True):
        assert max(of_rank) < 1e-13


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(
    "pins",
    [
        {"dp": 2, "tp": 2, "zero": 2, "sp": 1},
        {"cp": 2, "dp": 2},
        {"pp": 2, "dp": 2, "microbatches": 2},
        {"dp": 2, "tp": 2, "zero": 3, "recompute": "full"},
    ],
)
def test_other_sizes_under_other_plans(pools: Pools, pins: Mapping[str, PinValue]) -> None:
    sizes = [(8, 8), (4, 8), (8, 4)]
    for of_rank in pools.run(
        4, "support.processes.batch_sizes:errors", "llama", pins, sizes, False
    ):
        assert max(of_rank) < 1e-13


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ([(8, 8), (3, 8)], "3 samples do not divide over the 2 parts of dp2, zero3"),
    ],
)
def test_what_does_not_divide_is_refused(
    pools: Pools, sizes: list[tuple[int, int]], why: str
) -> None:
    with pytest.raises(AssertionError, match=why):
        pools.run(
            2, "support.processes.batch_sizes:errors", "llama", {"dp": 2, "zero": 3}, sizes, False
        )
