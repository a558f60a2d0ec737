"""Batch norm over ranks: a residual network trains like one process, running statistics too."""

import copy
from dataclasses import replace

import pytest
import torch
from support.models.vision import images, small_resnet
from support.processes.ranks import run_on_simulated_ranks
from support.programs.local_programs import Rank, capture, emit_uniform, local_part, on_ranks
from torch import Tensor, nn
from torch.nn import functional

from meshfold.api import plan_captured
from meshfold.capture.pipeline import Captured
from meshfold.codegen.emit.region import emit_typed
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.distributed.rank_mesh import RankMesh
from meshfold.distributed.step_context import StepContext
from meshfold.ir.mesh import Mesh, MeshAxis
from meshfold.ir.options import CompileOptions
from meshfold.ir.strategy import UniformStrategy
from meshfold.ops.batch_norm import batch_norm

LEARNING_RATE = 0.1
BATCH = 4

Step = tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]
"""Loss, gradients, buffers after the step."""


def one_process(model: nn.Module, batches: list[dict[str, Tensor]]) -> list[Step]:
    """Steps of gradient descent on a copy."""
    model = copy.deepcopy(model)
    steps = []
    for batch in batches:
        model.zero_grad()
        loss = model(**batch)
        loss.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        buffers = {n: b.clone() for n, b in model.named_buffers()}
        steps.append((loss.detach(), grads, buffers))
        with torch.no_grad():
            for p in model.parameters():
                p -= LEARNING_RATE * p.grad
    return steps


def check(model: nn.Module, strategy: UniformStrategy) -> EmittedProgram:
    """Two steps on every rank against one process."""
    batches = [images(BATCH, 16, 8, seed) for seed in range(2)]
    expected = one_process(model, batches)
    captured = capture(copy.deepcopy(model), batches[0])
    program = emitted(captured, strategy)

    def body(rank: Rank) -> None:
        for batch, (loss, grads, buffers) in zip(batches, expected, strict=True):
            found = rank.loss(batch)
            found.backward()
            close(found.detach(), loss)
            assert set(buffers) == set(rank.buffers)
            for name, buffer in rank.buffers.items():
                close(buffer, buffers[name])
            for name, parameter in rank.parameters.items():
                assert parameter.grad is not None, name
                close(parameter.grad, local_part(program, name, grads[name], rank.mesh))
                with torch.no_grad():
                    parameter -= LEARNING_RATE * parameter.grad
                parameter.grad = None

    on_ranks(model, captured, program, body)
    return program


def emitted(captured: Captured, strategy: UniformStrategy) -> EmittedProgram:
    """The program of a uniform strategy, recomputation included."""
    program = emit_uniform(captured, strategy, BATCH)
    if strategy.recompute == "none":
        return program
    typings = [replace(typing, recompute=strategy.recompute) for typing in program.typings]
    costs = CostModel(resolve_cluster("local-cpu", program.mesh.num_ranks), program.mesh)
    return emit_typed(captured.graph, typings, costs)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


STRATEGIES = [
    UniformStrategy(2, 1),
    UniformStrategy(2, 1, 3),
    UniformStrategy(4, 1),
    UniformStrategy(2, 2),
    UniformStrategy(2, 2, 3),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.label)
def test_training_equals_one_process(strategy: UniformStrategy) -> None:
    check(small_resnet(), strategy)


def rules_of(program: EmittedProgram, target: str) -> set[tuple[str, ...]]:
    """The rules that ops of this name run under."""
    return {
        typing.rules
        for region, of_region in zip(program.folded.regions, program.typings, strict=True)
        for op, typing in zip(region.graph.ops, of_region.ops, strict=True)
        if target in op.target
    }


def test_layers_that_repeat_and_are_recomputed_update_their_own_statistics_once() -> None:
    program = check(small_resnet((4,)), UniformStrategy(2, 1, recompute="full"))
    assert max(count for _, _, count in program.folded.runs) == 3
    assert rules_of(program, "batch_norm") == {("d0",)}


def test_channels_have_statistics_of_their_own() -> None:
    program = check(small_resnet((1,)), UniformStrategy(1, 2))
    assert ("c",) in rules_of(program, "batch_norm")


def test_in_eval_mode_nothing_is_synchronised_and_no_statistics_change() -> None:
    program = check(small_resnet((1,)).eval(), UniformStrategy(2, 1))
    assert rules_of(program, "batch_norm_legit_no_training") == {("d0",)}
    nodes = [node for region in program.regions for node in region.graph.graph.nodes]
    assert not any(node.target is batch_norm for node in nodes)


class Pooled(nn.Module):
    """images [n, 3, h, w], labels [n] -> mean cross entropy, of a norm over 1 x 1 maps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(8), nn.Flatten()
        )

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.layers(images), labels)


def test_ranks_with_one_value_a_channel_are_planned_and_exact() -> None:
    """Together they have several, as the batch norm of one process needs."""
    torch.manual_seed(0)
    model = Pooled().double()
    check(model, UniformStrategy(4, 1))
    captured = capture(copy.deepcopy(model), images(BATCH, 16, 8))
    plan = plan_captured(captured, "Pooled", "local-cpux4", CompileOptions(pins={"dp": 4}))
    assert plan.memory.peak > 0


class Mixed(nn.Module):
    """Norms of vectors and sequences, one without running statistics, one without weights, and one
    that is used twice in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(3, 8, 3, padding="same", groups=1)
        self.twice = nn.BatchNorm1d(8)
        self.depthwise = nn.Conv1d(8, 8, 3, padding=1, groups=8)
        self.of_batch = nn.BatchNorm1d(8, track_running_stats=False)
        self.groups = nn.GroupNorm(4, 8)
        self.plain = nn.BatchNorm1d(8, affine=False)
        self.head = nn.Linear(8, 8)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.twice(self.first(images.flatten(2)))
        x = self.of_batch(self.depthwise(functional.hardtanh(x)))
        x = self.twice(functional.avg_pool1d(self.groups(x), 4)).mean(-1)
        return functional.cross_entropy(self.head(self.plain(x)), labels)


@pytest.mark.parametrize("strategy", STRATEGIES[-1:], ids=lambda s: s.label)
def test_other_norms(strategy: UniformStrategy) -> None:
    torch.manual_seed(0)
    program = check(Mixed().double(), strategy)
    assert all(rules[0] == "d0" for rules in rules_of(program, "norm"))


def test_narrow_floats_have_statistics_in_float32() -> None:
    """bfloat16 images: the mean of many values near 100 would lose all digits in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    x = (100 + torch.randn(64, 4, generator=generator)).to(torch.bfloat16)
    half = x.chunk(2)
    running = torch.zeros(4), torch.ones(4)
    whole_op = torch.ops.aten._native_batch_norm_legit_functional
    expected = whole_op(x, None, None, *running, True, 0.5, 1e-5)
    mesh = Mesh((MeshAxis("dp", 2),))

    def body(rank: RankMesh) -> tuple[Tensor, ...]:
        context = StepContext(rank)
        return batch_norm(context, half[rank.rank], None, None, *running, 0.5, 1e-5, ("dp",))

    for rank, made in enumerate(run_on_simulated_ranks(mesh, body)):
        assert [t.dtype for t in made] == [torch.bfloat16, *[torch.float32] * 4]
        torch.testing.assert_close(made[0], expected[0].chunk(2)[rank], rtol=0.02, atol=0.02)
        for own, whole in zip(made[1:], expected[1:], strict=True):
            torch.testing.assert_close(own, whole.float(), rtol=1e-4, atol=1e-4)
