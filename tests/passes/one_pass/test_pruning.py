"""What rules leave of a tree, and what is counted under each."""

import pytest

from meshfold.errors import OptionError
from meshfold.passes.one_pass.pruning import Left


def test_what_rules_take_is_counted_in_strategies_under_the_first_that_takes_it() -> None:
    left = Left(range(1, 7), size=lambda leaf: leaf)
    assert left.num_strategies == 21
    left.prune("even", lambda leaf: leaf % 2 == 0)
    left.require("small", lambda leaf: leaf < 5, why_not=lambda name, _: name)
    left.prune("nothing", lambda leaf: leaf % 2 == 0)
    left.prune("even", lambda leaf: leaf == 3)
    assert left.left == [1] and left.pruned == {"even": 2 + 4 + 6 + 3, "small": 5}
    with pytest.raises(OptionError, match=r"large takes \[1\]"):
        left.require("large", lambda leaf: leaf > 1, lambda name, of: f"{name} takes {of}")
