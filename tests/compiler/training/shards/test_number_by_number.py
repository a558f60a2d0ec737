"""Functions that are taken to work number by number do, whatever torch calls them."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.overrides import get_overridable_functions

import meshfold.ops.draws  # noqa: F401 - its ops are asked for below
from meshfold.errors import OptionError
from meshfold.training.shards.local_shard import local_tensor, mark_gradient
from meshfold.training.shards.number_by_number import (
    _AS_IT_LIES,
    _bare_name,
    _is_known,
    draws,
    is_number_by_number,
    work_of,
)

FUNCTIONS = {
    f"{getattr(space, '__name__', space)}.{function.__name__}": function
    for space, functions in get_overridable_functions().items()
    for function in functions
    if hasattr(function, "__name__")
}
ONE_BY_ONE = [
    name
    for name, function in FUNCTIONS.items()
    if _is_known(_bare_name(function)) and _bare_name(function) not in _AS_IT_LIES
]


def _whole(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        return torch.rand(4, 3, generator=generator, dtype=dtype) * 0.8 + 0.1
    return torch.randint(1, 5, (4, 3), generator=generator).to(dtype)


def _calls(function: Callable[..., Any], dtype: torch.dtype) -> Iterator[list[Tensor]]:
    """What the function gives for a tensor alone and with other arguments, for the whole and for
    its two halves, put together again."""
    x, y, z = _whole(dtype), _whole(dtype).flip(0), _whole(dtype) + 1
    shapes = [(x,), (x, y), (x, y, z), (x, 2), (x, 0.5), (2, x), (x > 1, x, y), (x, x > 1, 0.0)]
    for arguments in shapes:

        def run(rows: slice, given: tuple[Any, ...] = arguments) -> Tensor:
            made = function(*(a[rows].clone() if isinstance(a, Tensor) else a for a in given))
            first = made[0] if isinstance(made, tuple | list) else made
            assert isinstance(first, Tensor)
            return first

        try:
            whole = run(slice(None))
            halves = torch.cat([run(slice(0, 2)), run(slice(2, 4))])
        except Exception:  # noqa: BLE001 - not a call of this function
            continue
        yield [whole, halves]


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool], ids=str)
def test_what_is_taken_to_work_number_by_number_does(dtype: torch.dtype) -> None:
    tried = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ONE_BY_ONE:
            for whole, halves in _calls(FUNCTIONS[name], dtype):
                # Of one tensor these are reductions, told apart by their arguments.
                if name.rsplit(".", 1)[1] in ("max", "min", "where") and whole.shape != (4, 3):
                    continue
                tried.add(name)
                assert whole.shape == halves.shape == (4, 3), name
                a, b = whole.nan_to_num(), halves.nan_to_num()
                # The last bit is another where vectors of numbers begin elsewhere.
                near = a == b if not a.dtype.is_floating_point else (a - b).abs() <= 1e-15 * a.abs()
                assert torch.equal(a.isnan(), b.isnan()) and near.all(), name
    assert len(tried) > {torch.float64: 300, torch.int64: 200, torch.bool: 60}[dtype]


def test_reductions_and_draws_are_told_from_them() -> None:
    x = torch.ones(2, 2)
    for name in "sum mean norm matmul softmax cumsum sort index_select scatter linalg_svd".split():
        assert not is_number_by_number(FUNCTIONS.get(f"torch.{name}", Tensor.norm), (x,), {})
    assert not is_number_by_number(Tensor.max, (x,), {})
    assert not is_number_by_number(Tensor.max, (x, 0), {"keepdim": True})
    assert is_number_by_number(torch.max, (x,), {"other": x})
    assert draws(Tensor.normal_) and draws(torch.rand_like) and not draws(Tensor.add_)
    assert work_of(Tensor.new_zeros).makes_another
    assert not work_of(torch.zeros_like).makes_another
    assert work_of(Tensor.__isub__).is_in_place and work_of(Tensor.add_).is_in_place
    assert not work_of(Tensor.__invert__).is_in_place
    assert not work_of(Tensor.__add__).is_in_place and not work_of(torch.add).is_in_place


def test_gradients_are_scaled_by_what_tells_other_ranks_of_an_inf() -> None:
    def gradient_of(scaler: torch.amp.GradScaler) -> Tensor:
        parameter = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([parameter], lr=0.0)
        scaler.scale(parameter.sum()).backward()
        mark_gradient(parameter)
        torch.amp.GradScaler.unscale_(scaler, optimizer)  # less what needs a process group
        assert parameter.grad is not None
        return local_tensor(parameter.grad)

    sharded = ShardedGradScaler("cpu", init_scale=8.0)
    assert gradient_of(sharded).tolist() == [1.0, 1.0]
    with pytest.raises(OptionError, match=r"leave out a step .* take .*\.ShardedGradScaler"):
        gradient_of(torch.amp.GradScaler("cpu", init_scale=8.0))


def test_an_op_of_another_library_is_taken_as_its_own_affair() -> None:
    x = torch.ones(2, 2)
    assert is_number_by_number(torch.ops.meshfold.uniform, (x,), {})
    assert not is_number_by_number(torch.ops.aten.sum.default, (x,), {})
    assert is_number_by_number(torch.ops.aten.add_.Tensor, (x, x), {})
    assert is_number_by_number(torch._foreach_lerp_, ([x], [x], 0.5), {})
    assert is_number_by_number(torch._fused_adamw_, ([x],), {})
    assert not is_number_by_number(torch._foreach_norm, ([x],), {})
