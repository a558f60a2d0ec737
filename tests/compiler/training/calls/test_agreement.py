"""Ranks that differ say so, on all of them, before anything is trained."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models.hugging_face import tiny_model
from support.processes.agreement import CLUSTER, ODD, batch, model
from support.processes.pool import Pools

from meshfold.api import plan_captured
from meshfold.capture.pipeline import capture
from meshfold.ir.options import CompileOptions
from meshfold.plan_file.io import plan_to_json
from meshfold.training.calls.agreement import checksum, text_of_call

LINES = {
    "seeds": "RanksDifferError: the initial values of up.weight on rank 3 are not those on rank 0",
    "model": "RanksDifferError: rank 3 has another program than rank 0",
    "options": "RanksDifferError: rank 3 has another program than rank 0",
    "planning": "RanksDifferError: rank 3 failed: ",
    "user error": "RanksDifferError: rank 3 failed: ",
    "dtype": "RanksDifferError: rank 3 makes another step than rank 0: .*float64",
    "shape": r"RanksDifferError: rank 3 makes another step than rank 0: .*float32\[4, 8\]",
    "slice": "RanksDifferError: rank 3 makes another step than rank 0",
    "rows": "RanksDifferError: target on rank 1 has other rows than on rank 0, and both have data_",
    "contents": "RanksDifferError: target on rank 3 has other contents than on rank 0",
    "contents later": "RanksDifferError: target on rank 3 has other contents than on rank 0",
    "mode": "RanksDifferError: rank 3 makes another step than rank 0: .* in eval mode",
    "call": "RanksDifferError: rank 3 makes another step than rank 0: call number 1, forward",
    "rates": r"RanksDifferError: ranks hold other numbers of \w+\.\w+, of which they are to",
    "left out": r"RanksDifferError: ranks hold other numbers of \w+\.\w+, of which they",
    "initialised": r"RanksDifferError: ranks hold other numbers of \w+\.\w+, of which they",
}
OWN = {"planning": "OptionError", "user error": "CaptureError"}
"""What the odd rank raises itself."""


def test_objects_are_compared_without_their_addresses() -> None:
    class Config:
        pass

    texts = [text_of_call("forward", {"x": torch.ones(2), "c": Config()}, True) for _ in range(2)]
    assert texts[0] == texts[1] and texts[0].startswith("forward in train mode of c=<")


@pytest.mark.multiprocess
@pytest.mark.parametrize("case", LINES)
def test_all_ranks_end_in_the_same_line(pools: Pools, case: str) -> None:
    lines = pools.run(4, "support.processes.agreement:line_of", case)
    for rank, line in enumerate(lines):
        assert "\n" not in line
        if case in OWN and rank == ODD:
            assert line.startswith(OWN[case])
        else:
            assert re.search(LINES[case], line), (rank, line)


@pytest.mark.multiprocess
def test_models_of_other_seeds_become_that_of_the_first_rank(pools: Pools) -> None:
    torch.manual_seed(0)
    expected = float(model(5)(**batch()).detach())
    found = pools.run(4, "support.processes.agreement:synced_losses", [5, 6, 7, 8])
    assert [loss for loss, _ in found] == pytest.approx([expected] * 4, rel=1e-5)
    warned = [lines for _, lines in found]
    assert len(warned[0]) == 1 and "all ranks have taken rank 0's" in warned[0][0]
    assert warned[1:] == [[], [], []]


@pytest.mark.multiprocess
def test_slices_by_data_rank_are_the_batch(pools: Pools) -> None:
    found = pools.run(4, "support.processes.agreement:sliced_losses")
    for sliced, whole in found:
        assert sliced == pytest.approx(whole, rel=1e-5)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_checksum_changes_with_any_number(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]))
    size = data.draw(st.integers(1, 70))
    x = torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(0)).to(dtype)
    at = data.draw(st.integers(0, size - 1))
    y = x.clone()
    y[at] = 1 - x[at].int()
    assert checksum(x) == checksum(x.clone())
    assert checksum(x) != checksum(y)


@settings(deadline=None, max_examples=40)
@given(st.permutations(range(9)))
def test_a_checksum_sees_the_order_of_rows(order: list[int]) -> None:
    x = torch.arange(9, dtype=torch.float64)
    assert (checksum(x) == checksum(x[order])) == (order == sorted(order))


def test_a_checksum_of_nothing_and_of_a_scalar() -> None:
    assert checksum(torch.empty(0)) == 0
    assert checksum(torch.tensor(1.0)) != checksum(torch.tensor(2.0))


@pytest.mark.multiprocess
def test_numbers_beyond_a_sharded_vocabulary_raise(pools: Pools) -> None:
    captured = capture(*tiny_model("llama", dtype=torch.float32))
    plan = plan_captured(captured, "llama", CLUSTER, CompileOptions(pins={"tp": 4}))
    arguments = "llama", captured, plan_to_json(plan)
    for found in pools.run(4, "support.processes.agreement:beyond_vocabulary", *arguments):
        assert re.search("class .* is not one of", found["labels"])
        assert re.search("embedding index .* is not one of", found["input_ids"])
