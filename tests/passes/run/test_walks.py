import itertools

import numpy as np
from support.search.runs import random_type, tight_problem

from meshfold.passes.run.chain import best_relaxation, prepare
from meshfold.passes.run.problem import Run
from meshfold.passes.run.walks import layout_walks


def test_all_walks_come_once_by_increasing_bound() -> None:
    rng = np.random.default_rng(1)
    runs = (Run(random_type(rng, "a", 9, 3), 2), Run(random_type(rng, "b", 9, 3), 5))
    chain = prepare(tight_problem(runs, 0.2, rng.uniform(0, 0.01, (3, 3))))
    found = list(layout_walks(chain, best_relaxation(chain)))
    bounds = [bound_s for bound_s, _ in found]
    assert bounds == sorted(bounds)
    first = [seen for size in (1, 2) for seen in itertools.permutations(range(3), size)]
    second = [seen for size in (1, 2, 3) for seen in itertools.permutations(range(3), size)]
    assert sorted(walk for _, walk in found) == sorted(itertools.product(first, second))


def test_first_walk_has_the_relaxed_bound() -> None:
    rng = np.random.default_rng(2)
    runs = (Run(random_type(rng, "a", 9, 3), 1), Run(random_type(rng, "b", 9, 3), 8))
    chain = prepare(tight_problem(runs, 0.2, rng.uniform(0, 0.01, (3, 3))))
    relaxed = best_relaxation(chain)
    assert abs(next(layout_walks(chain, relaxed))[0] - relaxed.dual_s) < 1e-12
