"""States in fewer bits: what is trained, kept, made during a step, saved and loaded."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes.low_precision import all_trained
from support.processes.pool import Pools
from support.programs.memory import allocator_peak_bytes
from torch import Tensor, nn

import meshfold
from meshfold.cost_models.op_costs.optimizers import update_of
from meshfold.errors import OptionError
from meshfold.low_precision import states as states_module
from meshfold.low_precision.states import LARGEST, LowPrecisionStates

MADE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01),
}


def weight(shape: tuple[int, ...] = (40, 50), dtype: torch.dtype = torch.float32) -> nn.Parameter:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return nn.Parameter(numbers.to(dtype))


def gradient(k: int, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(k + 1)
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.dtype)


def train(optimizer: torch.optim.Optimizer, first: int = 0, last: int = 4) -> None:
    """Steps `first` to `last` with gradients of their own."""
    for k in range(first, last):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = gradient(k, p)
        optimizer.step()


def kept_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Of states, without counts of steps."""
    values = [(k, x) for state in optimizer.state.values() for k, x in state.items()]
    return sum(x.untyped_storage().nbytes() for k, x in values if k != "step" and x is not None)


@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_training_is_near_that_of_whole_states(
    name: str, precision: Any, dtype: torch.dtype
) -> None:
    right, found = weight(dtype=dtype), weight(dtype=dtype)
    train(MADE[name]([right]))
    packed = LowPrecisionStates(MADE[name]([found]), precision)
    train(packed)
    moved = (right - weight(dtype=dtype)).abs().max()
    slack = 0.02 if dtype == torch.bfloat16 else 0.0
    assert (right - found).abs().max() < 0.1 * moved + slack
    kinds = {x.dtype for k, x in packed.state[found].items() if x is not None and k != "step"}
    narrow = {"bf16": {torch.bfloat16}, "int8": {torch.uint8, torch.float32}}[precision]
    assert kinds == (narrow if name != "SGD" else set())


@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize("item", [torch.float32, torch.bfloat16])
def test_states_and_what_a_step_makes_are_what_a_plan_says(
    precision: Any, item: torch.dtype
) -> None:
    """By the allocator, within 3 %."""
    p = weight((512, 300), item)
    optimizer = LowPrecisionStates(torch.optim.AdamW([p], lr=0.01), precision)
    p.grad = gradient(0, p)
    peak_bytes = allocator_peak_bytes(optimizer.step)  # states are there after its first run
    said = {"bf16": "adamw_bf16", "int8": "adamw_8bit"}[precision]
    expected = update_of(said, p.shape, p.nbytes, p.element_size())
    assert kept_bytes(optimizer) == expected.state_bytes
    assert peak_bytes == pytest.approx(expected.step_bytes, rel=0.03)


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_chunks_change_nothing(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, chunked = weight((7, 333)), weight((7, 333))
    train(LowPrecisionStates(torch.optim.AdamW([whole]), precision))
    monkeypatch.setattr(states_module, "CHUNK_NUMBERS", 512)
    packed = LowPrecisionStates(torch.optim.AdamW([chunked]), precision)
    train(packed)
    assert torch.equal(whole, chunked)
    assert packed.state[chunked]["step"] == 4


@pytest.mark.parametrize(("precision", "rows"), [("bf16", 3), ("int8", 64)])
def test_shards_train_bitwise_as_the_whole(precision: Any, rows: int) -> None:
    """In bfloat16 wherever they end, in 8 bits where blocks do: 64 rows of 20 are five."""
    whole = weight((4 * rows, 20))
    shards = [nn.Parameter(x.clone()) for x in whole.detach().split(rows)]
    one = LowPrecisionStates(torch.optim.AdamW([whole], lr=0.01), precision)
    others = [LowPrecisionStates(torch.optim.AdamW([x], lr=0.01), precision) for x in shards]
    for k in range(4):
        whole.grad = gradient(k, whole)
        one.step()
        for shard, part, optimizer in zip(shards, whole.grad.split(rows), others, strict=True):
            shard.grad = part
            optimizer.step()
    assert torch.equal(whole, torch.cat([x.detach() for x in shards]))


def test_a_parameter_that_is_not_contiguous_steps_at_once() -> None:
    plain, strided = weight(), nn.Parameter(weight().detach().t().contiguous().t())
    for p in (plain, strided):
        train(LowPrecisionStates(torch.optim.AdamW([p]), "int8"))
    assert torch.equal(plain, strided)


def test_what_has_no_gradient_or_no_numbers_is_left_alone() -> None:
    idle, empty, number = weight(), weight((0, 4)), weight(())
    optimizer = LowPrecisionStates(torch.optim.AdamW([idle, empty, number]), "int8")
    empty.grad, number.grad = torch.zeros_like(empty), torch.ones_like(number)
    optimizer.step()
    assert torch.equal(idle, weight()) and not torch.equal(number, weight(()))
    assert idle not in optimizer.state or not optimizer.state[idle]


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_a_state_dict_goes_on_bitwise(precision: Any) -> None:
    right, found = weight(), weight()
    first = LowPrecisionStates(torch.optim.AdamW([right], lr=0.01), precision)
    train(first, 0, 2)
    saved = copy.deepcopy(first.state_dict())
    second = LowPrecisionStates(torch.optim.AdamW([found], lr=0.5), precision)
    found.data.copy_(right.data)
    second.load_state_dict(saved)
    train(first, 2, 4)
    train(second, 2, 4)
    assert torch.equal(right, found) and second.param_groups[0]["lr"] == 0.01


def test_whole_states_are_packed_when_they_come() -> None:
    """With the optimizer, or loaded; and 8 bits are not loaded as 16."""
    p = weight()
    plain = torch.optim.AdamW([p], lr=0.01)
    train(plain)
    saved = copy.deepcopy(plain.state_dict())
    taken = LowPrecisionStates(plain, "int8")
    loaded = LowPrecisionStates(torch.optim.AdamW([p]), "int8")
    loaded.load_state_dict(saved)
    for name in ("exp_avg", "exp_avg_sq", "exp_avg" + LARGEST):
        assert torch.equal(taken.state[p][name], loaded.state[p][name])
    wide = LowPrecisionStates(torch.optim.AdamW([p]), "bf16")
    with pytest.raises(OptionError, match="were saved in 8 bits, and are to be kept in bf16"):
        wide.load_state_dict(taken.state_dict())


def test_an_optimizer_that_knows_no_codes_does_not_train_on_them() -> None:
    """Codes are up to 255: they must not become averages of gradients."""
    p = weight()
    packed = LowPrecisionStates(torch.optim.AdamW([p]), "int8")
    train(packed)
    plain = torch.optim.AdamW([p])
    plain.load_state_dict(packed.state_dict())
    with pytest.raises(KeyError, match="exp_avg"):
        train(plain)


@pytest.mark.parametrize("precision", ["full", "int8", "bf16"])
def test_states_of_another_shard_are_refused_when_they_are_loaded(precision: Any) -> None:
    plain, other = torch.optim.AdamW([weight((40, 50))]), torch.optim.AdamW([weight((30, 50))])
    saved = plain if precision == "full" else LowPrecisionStates(plain, precision)
    train(saved)
    taken = LowPrecisionStates(other, "bf16" if precision == "bf16" else "int8")
    with pytest.raises(
        OptionError, match=r"exp_avg of parameter 0 was saved with shape \[40, 50\]"
    ):
        taken.load_state_dict(saved.state_dict())
    assert not taken.state


def test_a_scheduler_that_was_made_before_goes_on() -> None:
    inner = torch.optim.AdamW([weight()], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(inner, lambda k: 0.5**k)
    optimizer = LowPrecisionStates(inner, "int8")
    for k in range(3):
        assert optimizer.param_groups[0]["lr"] == 0.5**k
        train(optimizer, 0, 1)
        scheduler.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_schedulers_closures_and_files_go_on(tmp_path: Path) -> None:
    p = weight((200, 500))
    optimizer = LowPrecisionStates(torch.optim.SGD([p], lr=1.0, momentum=0.9), "int8")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    meshfold.keep_states_on_disk(optimizer, tmp_path)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    before = closure().item()
    assert optimizer.step(closure).item() == before
    scheduler.step()
    optimizer.step(closure)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert "meshfold-state-" in Path("/proc/self/maps").read_text()


def test_others_are_refused() -> None:
    with pytest.raises(OptionError, match="states in 'int4' are unknown; write bf16 or int8"):
        LowPrecisionStates(torch.optim.AdamW([weight()]), "int4")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="states of Adafactor cannot be kept in int8"):
        LowPrecisionStates(torch.optim.Adafactor([weight()]), "int8")


RUNS: list[tuple[dict[str, Any], Any]] = [
    *(({"dp": 2, "zero": z}, "bf16") for z in (0, 2, 3)),
    ({"tp": 2}, "bf16"),
    ({"dp": 2, "zero": 1, "microbatches": 2}, "bf16"),
    ({"dp": 2, "zero": 0}, "int8"),
    ({"dp": 2, "zero": 3}, "int8"),
    ({"tp": 2}, "int8"),
]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_ranks_train_as_one_process_does(pools: Pools, tmp_path: Path) -> None:
    """In float64 the gradients of ranks differ from one process' in the last bits, which states in
    bfloat16 do not have. 8-bit blocks are those of the rank: equal where it has whole parameters.
    """
    (right,), (eight,) = (
        all_trained([({}, precision)], str(tmp_path / f"one {precision}"))
        for precision in ("bf16", "int8")
    )
    arguments = RUNS, str(tmp_path / "ranks")
    found = pools.run(2, "support.processes.low_precision:all_trained", *arguments)[0]
    for (pins, precision), run in zip(RUNS, found, strict=True):
        one = right if precision == "bf16" else eight
        apart = max(
            float((one.parameters[n] - run.parameters[n]).abs().max()) for n in one.parameters
        )
        alike = precision == "bf16" or pins.get("zero") == 0
        assert apart < (1e-12 if alike else 0.01), (pins, precision, apart)
        assert run.resumed, (pins, precision)
        assert run.stored_bytes == run.planned_bytes, (pins, precision)
