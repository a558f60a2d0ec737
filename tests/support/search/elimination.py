"""Elimination of factors that are met once."""

from collections.abc import Sequence

from meshfold.passes.region.elimination import Elimination, EliminationPlan, Factor


def eliminate(
    domains: Sequence[int],
    factors: Sequence[Factor],
    keep: Sequence[int] = (),
    order: Sequence[int] | None = None,
) -> Elimination:
    """Eliminate every variable but those of `keep`."""
    plan = EliminationPlan(domains, [f.variables for f in factors], keep, order)
    return plan.run([factor.table for factor in factors])
