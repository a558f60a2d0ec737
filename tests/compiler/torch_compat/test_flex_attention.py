"""flex_attention: captured in dense form, shared by batch and heads; what torch's own computes."""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from support.programs.local_programs import emit_uniform, errors_of_a_step
from torch import Tensor, nn
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from meshfold.capture.pipeline import Captured, capture
from meshfold.errors import CaptureError
from meshfold.ir.strategy import UniformStrategy
from meshfold.torch_compat.flex_attention import dense_flex_attention
from meshfold.validation.float64_mode import float64_everywhere

BATCH, LENGTH, HEADS, WIDTH = 4, 6, 4, 16


class Attention(nn.Module):
    """Attention inside of documents, causal, with a bias per head where `scores` says so."""

    def __init__(self, scores: str = "", **options: Any) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.bias = nn.Parameter(torch.randn(HEADS, LENGTH, LENGTH))
        self.scores, self.options = scores, options

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        query, key, value = (
            t.unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2)
            for t in self.qkv(x).chunk(3, -1)
        )
        found = flex_attention(
            query,
            key,
            value,
            score_mod=self.score_mod(),
            block_mask=self.mask(documents),
            **self.options,
        )
        assert isinstance(found, Tensor)
        return found.square().mean()

    def mask(self, documents: Tensor) -> BlockMask:
        def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return i >= j

        def within(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            # Nothing is left of some rows.
            return (i >= j) & (documents[b, i] == documents[b][j]) & (documents[b, i] > 0)

        if self.scores == "causal":
            return create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu")
        return create_block_mask(within, documents.shape[0], None, LENGTH, LENGTH, device="cpu")

    def score_mod(self) -> Callable[..., Tensor] | None:
        def biased(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return torch.tanh(score) + self.bias[h, i][j] + 0.1 * h * b

        return {"bias": biased, "same": lambda score, b, h, i, j: score}.get(self.scores)


def made(scores: str, **options: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Attention(scores, **options).double()
        x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
        return model, {"x": x, "documents": torch.randint(0, 3, (BATCH, LENGTH))}


@cache
def captured(scores: str) -> Captured:
    with float64_everywhere():
        return capture(*made(scores))


def targets(scores: str) -> list[str]:
    return [op.target for region in captured(scores).graph.regions for op in region.graph.ops]


SDPA = "aten.scaled_dot_product_attention.default"


@pytest.mark.parametrize("scores", ["", "same", "causal"])
def test_plain_scores_are_one_op(scores: str) -> None:
    assert SDPA in targets(scores) and "aten.softmax.int" not in targets(scores)
    graph = captured(scores).graph.regions[0].graph
    (op,) = (op for op in graph.ops if op.target == SDPA)
    assert (len(op.operands) == 3) == (scores == "causal"), "a causal mask needs no flags"


@pytest.mark.parametrize("scores", ["same", "bias"])
@pytest.mark.parametrize(
    "strategy",
    [UniformStrategy(dp=4), UniformStrategy(tp=2), UniformStrategy(dp=2, tp=2, zero=3)],
    ids=lambda s: s.label,
)
def test_ranks_compute_what_one_process_computes(scores: str, strategy: UniformStrategy) -> None:
    model, batch = made(scores)
    with dense_flex_attention():
        loss = model(**batch)
    named = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    right = loss.detach(), dict(zip(named, gradients, strict=True))
    program = emit_uniform(captured(scores), strategy, BATCH)
    for errors in errors_of_a_step(model, batch, captured(scores), program, right):
        assert max(errors.values()) < 1e-12


@pytest.mark.parametrize("scores", ["", "bias"])
def test_it_is_what_torch_computes(scores: str) -> None:
    model, batch = made(scores)
    with torch.no_grad():
        with dense_flex_attention():
            dense = model(**batch)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert abs(float(dense - model(**batch))) < 1e-12


def test_torch_has_its_own_again() -> None:
    codes = flex_attention.__code__, create_block_mask.__code__
    with dense_flex_attention():
        assert flex_attention.__code__ is not codes[0]
    assert (flex_attention.__code__, create_block_mask.__code__) == codes


class BlocksOnly(Attention):
    def mask(self, documents: Tensor) -> BlockMask:
        none = torch.zeros(1, 1, 1, dtype=torch.int32)
        return BlockMask.from_kv_blocks(none, none.unsqueeze(-1), BLOCK_SIZE=LENGTH)


def test_what_has_no_dense_form_is_refused_in_one_line() -> None:
    model, batch = made("", return_aux=AuxRequest(lse=True))
    with pytest.raises(CaptureError, match="statistics") as error:
        capture(model, batch)
    with pytest.raises(CaptureError, match="no mask_mod") as other:
        capture(BlocksOnly().double(), batch)
    assert "\n" not in str(error.value) + str(other.value)
