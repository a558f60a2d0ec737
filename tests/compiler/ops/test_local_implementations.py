"""What the gate of the rules does not see: random masks, ignored targets, padding rows."""

import pytest
import torch
from support.graphs.ops import SingleOp, check_typings, mesh_of, run_whole
from support.graphs.tensors import real, whole
from support.processes.ranks import run_on_simulated_ranks
from torch import Tensor
from torch.nn import functional

from meshfold.codegen.emit import op as emit_op
from meshfold.distributed.rank_mesh import RankMesh
from meshfold.distributed.step_context import StepContext
from meshfold.ops import local_implementations as local_ops

X = real(4, 12)
DIGITS = ((("dp", 1, 0),), (("tp", 2, 0),))


def test_every_local_implementation_has_an_emitter() -> None:
    assert set(local_ops.LOCAL_OPS) == set(emit_op._EMITTERS)


def dropped(context: StepContext, instance: int = 0) -> Tensor:
    x = torch.ones(2, 6, dtype=torch.float64)
    return local_ops.dropout(context, x, 0.5, (instance, 0), (4, 12), DIGITS, (0, 1, 1))


def test_steps_seeds_and_instances_drop_different_elements_on_every_rank() -> None:
    def body(mesh: RankMesh) -> list[Tensor]:
        context = StepContext(mesh)
        found = [dropped(context), dropped(context), dropped(context, instance=1)]
        return found + [dropped(StepContext(mesh, rng)) for rng in ((0, 1), (1, 0))]

    for first, again, *others in run_on_simulated_ranks(mesh_of(2, 2), body):
        assert first.equal(again)
        assert not any(first.equal(other) for other in others)


def test_dropout_keeps_the_mean_and_the_zeros_have_no_gradient() -> None:
    op = SingleOp("aten.dropout.default", real(40, 50), 0.25, True)
    (y,), (gradient,) = run_whole(op, [torch.ones(40, 50, dtype=torch.float64)])
    assert set((gradient * 3).round(decimals=9).unique().tolist()) == {0.0, 4.0}
    torch.testing.assert_close(y, op.tensors[0].detach() * gradient)
    assert abs(gradient.mean().item() - 1.0) < 0.05


@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_dropout_of_nothing_and_of_everything(probability: float) -> None:
    op = SingleOp("aten.dropout.default", X, probability, True)
    (y,), _ = run_whole(op, [torch.ones_like(X)])
    assert y.equal(X.detach() * (1.0 - probability))


def test_attention_dropout_of_rows_without_a_key_gives_zeros() -> None:
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[1] = False
    query = real(1, 2, 4, 3)
    op = SingleOp(
        "aten.scaled_dot_product_attention.default", query, real(1, 2, 4, 3), query, mask, 0.3
    )
    (y,), gradients = run_whole(op, [torch.ones(1, 2, 4, 3, dtype=torch.float64)])
    assert y[:, :, 1].abs().max() == 0.0
    assert all(g.isfinite().all() for g in gradients)


def test_attention_dropout_is_attention_on_average() -> None:
    query, key, value = real(1, 2, 4, 3), real(1, 2, 4, 3), real(1, 2, 4, 3)
    name = "aten.scaled_dot_product_attention.default"
    op = SingleOp(name, query, key, value, None, 0.3)
    mesh = mesh_of(1)
    module = op.emitted(op.typings(1)[0], mesh)

    def body(rank_mesh: RankMesh) -> Tensor:
        total = torch.zeros_like(query)
        for step in range(400):
            total += module(StepContext(rank_mesh, (0, step)), query, key, value)[0]
        return total.detach() / 400

    (mean,) = run_on_simulated_ranks(mesh, body)
    expected = functional.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(mean, expected.detach(), atol=0.05, rtol=0.0)


def test_cross_entropy_when_a_rank_ignores_all_its_rows() -> None:
    target = whole(8, 8)
    target[:4] = -100
    op = SingleOp("aten.cross_entropy_loss.default", real(8, 8), target)
    check_typings(op, mesh_of(2), op.typings(2))
    check_typings(op, mesh_of(2, 2), op.typings(2, 2))


def test_cross_entropy_without_a_target_is_not_a_number() -> None:
    op = SingleOp("aten.cross_entropy_loss.default", real(8, 8), torch.full((8,), -100))
    (expected,), _ = run_whole(op, [torch.ones((), dtype=torch.float64)])
    assert expected.isnan()
    rows = [t for t in op.typings(2) if t.rules == ("d0",)]
    check_typings(op, mesh_of(2), rows)


def test_sharded_cross_entropy_of_half_precision_sums_in_float32() -> None:
    logits = 5 * real(6, 64, grad=False).bfloat16()
    target = whole(64, 6)
    expected = functional.cross_entropy(logits.float(), target)

    def body(mesh: RankMesh) -> Tensor:
        part = logits.chunk(2, 1)[mesh.rank].requires_grad_()
        classes = 64, (("dp", 1, 0),)
        context = StepContext(mesh)
        loss = local_ops.cross_entropy(context, part, target, None, "mean", -100, 0.0, *classes, ())
        loss.backward()  # type: ignore[no-untyped-call]
        assert part.grad is not None and part.grad.dtype == torch.bfloat16
        return loss.detach()

    for loss in run_on_simulated_ranks(mesh_of(2), body):
        assert loss.dtype == torch.bfloat16
        torch.testing.assert_close(loss.float(), expected, rtol=0.01, atol=0.01)


def test_the_padding_row_has_no_gradient_wherever_it_lives() -> None:
    ids = whole(24, 4, 6)
    ids[0] = 5
    for padding in (0, 5, 23):
        op = SingleOp("aten.embedding.default", real(24, 12), ids, padding)
        check_typings(op, mesh_of(2, 2), [t for t in op.typings(2, 2) if "v" in t.rules])
