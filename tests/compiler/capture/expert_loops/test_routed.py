"""Loops over experts in the usual styles: the graph computes what the loop does, and ranks share
the experts' products."""

import inspect
import linecache
from pathlib import Path
from tokenize import TokenError
from typing import Any

import pytest
import torch
from support.models.expert_styles import EXPERTS, STYLES, WIDTH, Expert, Style, Where, mixture
from support.programs.local_programs import emit_uniform, errors_of_a_step
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.capture.expert_loops.forms import without_loops
from meshfold.capture.expert_loops.routed import routed, without_loops_of
from meshfold.capture.pipeline import Captured, capture
from meshfold.capture.trace.functions import definition
from meshfold.errors import CaptureError
from meshfold.ir.strategy import UniformStrategy
from meshfold.passes.rules.ops.experts import DISPATCH, EXPERT_LINEAR
from meshfold.validation.float64_mode import float64_everywhere

STRATEGIES = (
    UniformStrategy(dp=2, zero=3),
    UniformStrategy(tp=2, sequence_parallel=True),
)


def targets(captured: Captured) -> list[str]:
    regions = captured.graph.regions
    return [op.target for i in captured.graph.instances for op in regions[i.region].graph.ops]


@pytest.mark.parametrize("style", STYLES, ids=lambda s: s.__name__)
def test_a_loop_computes_what_it_does_in_one_process(style: type[Style]) -> None:
    model, batch = mixture(style, bias=style is Where)
    with float64_everywhere():
        captured = capture(model, batch)
    assert targets(captured).count(EXPERT_LINEAR) == 6
    assert targets(captured).count(DISPATCH) >= 2
    sources = {
        op.source for r in captured.graph.regions for op in r.graph.ops if "clamp" in op.target
    }
    file, _, line = sources.pop().rpartition(":")
    assert linecache.getline(file, int(line)).strip().startswith("for ") and not sources
    assert any("all experts run in one graph" in note for note in captured.graph.notes)
    assert all(type(layer) is style for layer in model.layers), "the model is changed"
    for strategy in STRATEGIES:
        program = emit_uniform(captured, strategy, 4)
        for errors in errors_of_a_step(model, batch, captured, program):
            assert max(errors.values()) < 1e-12


def a_norm(layer: Any) -> None:
    for expert in layer.experts:
        expert.w1 = nn.Sequential(nn.LayerNorm(WIDTH), expert.w1)


def another_width(layer: Any) -> None:
    layer.experts[1].w1, layer.experts[1].w3 = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)
    layer.experts[1].w2 = nn.Linear(4, WIDTH)


def a_hook(layer: Any) -> None:
    layer.experts[2].register_forward_hook(lambda *_: None)


@pytest.mark.parametrize("change", [a_norm, another_width, a_hook], ids=lambda f: f.__name__)
def test_experts_that_are_not_alike_keep_their_loop(change: Any) -> None:
    model, batch = mixture(Where)
    change(model.layers[1])
    with pytest.raises(CaptureError, match=r"where gives .* of loops over experts this form is"):
        capture(model.double().float(), {"x": batch["x"].float()})


class Mixes(Expert):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.w2(F.silu(self.w1(x)).cumsum(0))
        return made


def test_experts_that_mix_rows_are_refused() -> None:
    model, batch = mixture(Where)
    for layer in model.layers:
        layer.experts = nn.ModuleList(Mixes() for _ in range(EXPERTS))
    with pytest.raises(
        CaptureError, match="experts in a loop call cumsum, of which it is not known"
    ):
        capture(model.float(), {"x": batch["x"].float()})


def simple(order: range | None, ids: Tensor, **options: Any) -> Tensor:
    experts = [nn.Linear(2, 2, bias=False) for _ in range(3)]
    for k, expert in enumerate(experts):
        expert.weight.data.copy_((k + 1) * torch.eye(2))
    x = torch.ones(ids.shape[0], 2)
    return routed(torch.full_like(x, 0.5), experts, order, ids, x, None, **options)


def test_places_that_name_no_expert_add_nothing() -> None:
    kind = {"by": "place", "by_expert": False}
    ids = torch.tensor([0, 2, 7, -1])
    added = simple(None, ids, adds=True, **kind)
    assert added[:, 0].tolist() == [1.5, 3.5, 0.5, 0.5]
    put = simple(range(3), ids, adds=False, **kind)
    assert put[:, 0].tolist() == [1.0, 3.0, 0.5, 0.5]


def test_a_row_that_names_an_expert_twice_comes_once_where_masks_choose() -> None:
    ids = torch.tensor([[0, 0], [1, 2]])
    for by, expected in (("any", [1.5, 5.5]), ("row", [2.5, 5.5])):
        assert simple(None, ids, by=by, adds=True, by_expert=False)[:, 0].tolist() == expected


def test_loops_over_some_experts_or_by_other_dims_are_refused() -> None:
    kind = {"by": "place", "by_expert": False, "adds": True}
    with pytest.raises(CaptureError, match=r"goes over range\(0, 2\) of 3; let it go over all"):
        simple(range(2), torch.tensor([0]), **kind)
    with pytest.raises(CaptureError, match="takes rows of shapes"):
        simple(None, torch.tensor([[0, 1]]), **kind)


def test_a_file_that_is_no_longer_what_runs_is_no_error(tmp_path: Path) -> None:
    """As of a block in a notebook or a document: from the function's line on it is no Python."""
    text = "class Kept(nn.Module):\n    def forward(self, x):\n        return self.experts[0](x)\n"
    file = tmp_path / "model.py"
    names: dict[str, Any] = {"nn": nn}
    exec(compile(text, str(file), "exec"), names)
    file.write_text("\n(\n(\n(\n(\n")
    module = names["Kept"]()
    module.experts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    with pytest.raises(TokenError):
        inspect.getsourcelines(type(module).forward)
    assert without_loops_of(module) is None
    assert without_loops(module) == ()
    assert definition(type(module).forward) == ""
