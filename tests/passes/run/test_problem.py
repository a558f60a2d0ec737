from collections.abc import Callable

import numpy as np
import pytest

from meshfold.passes.run.problem import Block, LayerType, Run, RunPlan, RunProblem


def layer(memory: np.ndarray | None = None, **changes: object) -> LayerType:
    parts: dict[str, object] = {
        "name": "mlp",
        "strategies": ("a", "b"),
        "time_s": np.array([1.0, 2.0]),
        "memory_bytes": np.array([5, 3]) if memory is None else memory,
    }
    return LayerType(**(parts | changes))  # type: ignore[arg-type]


def two_layouts(conversion_s: np.ndarray) -> RunProblem:
    return RunProblem((Run(layer(layouts=np.array([0, 1])), 1),), 9, 0, conversion_s)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: layer(strategies=("a", "a")), "mlp: strategies need unique names"),
        (lambda: layer(time_s=np.ones(3)), r"mlp: 2 strategies, but arrays of \[\(3,\), \(2,\)\]"),
        (lambda: layer(layouts=np.array([0])), "mlp: 2 strategies, but arrays"),
        (lambda: layer(time_s=np.array([1.0, np.nan])), "mlp: time_s must be finite"),
        (lambda: layer(np.array([1.5, 2.0])), "mlp: memory_bytes must be whole bytes"),
        (lambda: layer(np.array([1, -2])), "mlp: memory_bytes must not be negative"),
        (lambda: Run(layer(), 0), "a run of mlp needs at least one layer"),
        (lambda: RunProblem(()), "at least one run"),
        (lambda: two_layouts(np.zeros((2, 3))), r"must be square, found shape \(2, 3\)"),
        (lambda: two_layouts(np.full((2, 2), -1.0)), "finite and not negative"),
        (lambda: two_layouts(np.full((2, 2), np.inf)), "finite and not negative"),
        (lambda: two_layouts(np.zeros((1, 1))), r"mlp: layouts outside 0..0"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(
    make: Callable[[], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_least_memory_counts_every_layer_and_the_fixed_part() -> None:
    problem = RunProblem((Run(layer(), 3), Run(layer(np.array([7, 8])), 2)), None, 100)
    assert problem.least_bytes == 100 + 3 * 3 + 2 * 7


def test_counts_add_up_blocks_of_one_strategy() -> None:
    blocks = (Block(0, 0, "a", 2), Block(0, 1, "b", 1), Block(1, 0, "a", 4), Block(0, 0, "a", 3))
    plan = RunPlan(blocks, 1.0, 0.0, 1, 1.0, 0.0, 0.0, 1, False)
    assert plan.counts(2) == ({"a": 5, "b": 1}, {"a": 4})
