"""Random numbers in a captured program that no rule draws alike on all ranks."""

import torch

from meshfold.capture.trace.raw_program import Program, RawOp
from meshfold.ops.registry import torch_target
from meshfold.passes.rules.ops.random import RANDOM_OPS


def notes_of_draws(program: Program) -> tuple[str, ...]:
    """One line per op that draws such numbers: a plan of it can be priced, but does not run."""
    first: dict[str, RawOp] = {}
    for op in program.ops:
        if op.target not in first and _draws(op.target):
            first[op.target] = op
    return tuple(
        f"{target} in {op.stack[-1] if op.stack else 'the model'} draws random numbers, which "
        "cannot run yet; switch it off in the model's configuration, or draw outside the model "
        "and pass the numbers in"
        for target, op in first.items()
    )


def _draws(target: str) -> bool:
    if target in RANDOM_OPS or not target.startswith("aten."):
        return False
    return torch.Tag.nondeterministic_seeded in torch_target(target).tags  # type: ignore[attr-defined]
