"""torch.utils.checkpoint in a model: captured as a plain call."""

from collections.abc import Callable

import pytest
import torch
from support.models.hard_to_verify import (
    checkpointed_blocks,
    frozen_half,
    plain_blocks,
    recomputed_blocks,
)
from torch import nn
from torch.utils import checkpoint

from meshfold.api import plan_captured
from meshfold.capture.pipeline import capture
from meshfold.ir.options import CompileOptions
from meshfold.passes.fold.assemble import fingerprint


def test_a_checkpointed_model_is_captured_as_without() -> None:
    before = checkpoint.CheckpointFunction
    plain = fingerprint(capture(*plain_blocks()).graph)
    assert fingerprint(capture(*checkpointed_blocks()).graph) == plain
    assert fingerprint(capture(*recomputed_blocks()).graph) == plain
    assert checkpoint.CheckpointFunction is before


@pytest.mark.parametrize("built", [checkpointed_blocks, recomputed_blocks])
def test_the_plan_says_what_the_model_asks_for_and_may_keep_it(
    built: Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]],
) -> None:
    captured = capture(*built())
    assert len(captured.checkpointed) == 1
    plan = plan_captured(captured, "Blocks", "local-cpux1", CompileOptions())
    assert any("asks for recomputation of Blocks.forward.<lambda>" in note for note in plan.notes)
    assert {region.typing.recompute for region in plan.regions} == {"none"}
    kept = CompileOptions(keep_checkpointing=True)
    plan = plan_captured(captured, "Blocks", "local-cpux1", kept)
    assert {region.typing.recompute for region in plan.regions} == {"full"}
    plain = plan_captured(capture(*plain_blocks()), "Blocks", "local-cpux1", kept)
    assert {region.typing.recompute for region in plain.regions} == {"none"}


def test_modules_go_by_their_class() -> None:
    captured = capture(Lost(), {"x": torch.randn(2, 4)})
    assert captured.checkpointed == ("Linear",)


class Lost(nn.Module):
    """A reentrant checkpoint of what needs no gradient gives its parameters none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint.checkpoint(self.first, x, use_reentrant=True)
        return self.last(y).square().mean()  # type: ignore[no-any-return]


def test_what_gets_no_gradient_in_torch_gets_none() -> None:
    graph = capture(Lost(), {"x": torch.randn(2, 4)}).graph
    targets = [op.target for region in graph.regions for op in region.graph.ops]
    assert targets.count("aten.detach.default") >= 1


def test_a_frozen_first_half_keeps_its_gradients_behind() -> None:
    graph = capture(*frozen_half()).graph
    trained = {p.name for p in graph.parameters if p.requires_grad}
    assert trained == {"blocks.2.weight", "blocks.2.bias"}
