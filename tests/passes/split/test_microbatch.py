"""A microbatch's graph, written from the full batch's: as if captured with the smaller batch."""

import pytest
import torch
from support.models.hugging_face import BATCH, families, tiny_model
from torch import nn

from meshfold.capture.pipeline import capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.errors import OptionError
from meshfold.ir.op_graph import Op, Symbol
from meshfold.passes.region.typing import MeshSearch
from meshfold.passes.split.loss_counts import COUNT
from meshfold.passes.split.microbatch import MicrobatchGraphs
from meshfold.passes.split.pieces import cut_as
from meshfold.validation.captured_alone import captured_step

CLUSTER = resolve_cluster("local-cpu", 4)


@pytest.mark.parametrize("family", families("gpt2", without=("llama", "bert", "vit", "mixtral")))
def test_prices_are_those_of_a_capture_with_the_smaller_batch(family):
    model, batch = tiny_model(family)
    half = {name: tensor[: BATCH // 2] for name, tensor in batch.items()}
    written = MicrobatchGraphs(capture(model, batch).graph, CLUSTER, BATCH).graph(2)
    small = capture(model, half).graph
    mesh = build_mesh(CLUSTER, 1, 2)
    found, expected = (
        MeshSearch(g, CLUSTER, mesh, BATCH // 2).solve(zero=0, mode="sequence")
        for g in (written, small)
    )
    launch_s = CostModel(CLUSTER, mesh).launch_s
    for region, ours, theirs in zip(written.regions, found.prices, expected.prices, strict=True):
        # Behind its sum, a loss divides by the targets of the whole step.
        more_s = launch_s * sum(_divides_by_targets(op) for op in region.graph.ops)
        # Microbatches of what is not sliced (position ids) cost a launch here and there.
        assert ours.forward_s == pytest.approx(theirs.forward_s + more_s, rel=2e-3)
        # The division moves single numbers, in a nanosecond.
        assert ours.backward_s == pytest.approx(
            theirs.backward_s + more_s, rel=1e-4 if more_s else 1e-6
        )
        assert ours.graph_forward_s == pytest.approx(theirs.graph_forward_s)
        assert ours.graph_backward_s == pytest.approx(theirs.graph_backward_s)
        assert ours.communication_s == pytest.approx(theirs.communication_s)


def _divides_by_targets(op: Op) -> bool:
    return any(isinstance(a, Symbol) and a.kind == COUNT for a in op.args)


def test_the_full_batch_is_the_program_itself():
    model, batch = tiny_model("llama")
    folded = capture(model, batch).graph
    graphs = MicrobatchGraphs(folded, CLUSTER, BATCH)
    assert graphs.graph(1) is folded
    assert graphs.graph(2) is graphs.graph(2)
    with pytest.raises(ValueError, match="does not divide into 3 microbatches"):
        graphs.graph(3)


class MeanOverBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        return (hidden - hidden.mean(dim=0, keepdim=True)).square().sum()


def test_statistics_over_the_batch_are_refused():
    folded = capture(MeanOverBatch(), {"x": torch.zeros(4, 8)}).graph
    where = r"mean.dim \(.*test_microbatch.py:\d+\)|sub.Tensor \(.*test_microbatch.py:\d+\)"
    with pytest.raises(OptionError, match=f"cannot be split into microbatches: ({where})"):
        MicrobatchGraphs(folded, CLUSTER, 4).graph(2)


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x).square().sum()


class Standardized(nn.Module):
    """Convolutions whose weights are standardized by a batch norm of a batch of one, as BiT's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            weight = torch.nn.functional.batch_norm(
                layer.weight.reshape(1, 4, -1), None, None, training=True
            ).reshape_as(layer.weight)
            x = torch.nn.functional.conv2d(x, weight, padding=1).relu()
        return x.square().mean()


def test_statistics_over_a_weight_are_not_over_the_batch():
    folded = capture(Standardized(), {"x": torch.zeros(4, 4, 4, 4)}).graph
    graphs = MicrobatchGraphs(folded, CLUSTER, 4)
    assert graphs.refusal == "" and graphs.input_layouts()["x"][0].is_shard
    # In regions of their own, too, where as many channels as samples look like a batch.
    (region,) = folded.regions
    cut = cut_as(folded, (3, len(region.graph.ops) - 3)).folded
    assert MicrobatchGraphs(cut, CLUSTER, 4).refusal == ""


def test_statistics_of_a_batch_norm_are_refused_by_name():
    folded = capture(Normalised(), {"x": torch.zeros(4, 8)}).graph
    graphs = MicrobatchGraphs(folded, CLUSTER, 4)
    named = r"_native_batch_norm_legit_functional \(.*test_microbatch.py:\d+, in norm\)"
    with pytest.raises(OptionError, match=f"{named} takes statistics over the batch; pin batch_n"):
        graphs.graph(2)
    assert graphs.graph(1) is folded
    own = MicrobatchGraphs(folded, CLUSTER, 4, per_microbatch=True).graph(2)
    (region,) = own.regions
    (norm,) = (op for op in region.graph.ops if "batch_norm" in op.target)
    assert region.graph.values[norm.operands[0]].shape == (2, 8)
    assert region.graph.mutations


class ProductOfMeans(nn.Module):
    """Nonlinear in the batch, as the auxiliary losses of mixtures of experts are."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        return hidden.mean() * hidden.square().mean()


def test_products_of_means_are_refused():
    folded = capture(ProductOfMeans(), {"x": torch.zeros(4, 8)}).graph
    with pytest.raises(
        OptionError, match=r"mul.Tensor \(.*test_microbatch.py:\d+\) needs mean.* of all samples"
    ):
        MicrobatchGraphs(folded, CLUSTER, 4).graph(2)


class LearnedTargets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.first(x)
        return nn.functional.cross_entropy(logits, logits.argmax(-1))


def test_a_count_of_targets_that_the_model_computes_is_refused():
    folded = capture(LearnedTargets(), {"x": torch.zeros(4, 8)}).graph
    with pytest.raises(OptionError, match="targets of aten.cross_entropy_loss.* follow from first"):
        MicrobatchGraphs(folded, CLUSTER, 4).graph(2)


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("largest", torch.zeros(4))

    def forward(self, x):
        y = self.linear(x)
        self.largest.copy_(self.largest * 0.9 + torch.rand(4))
        return (y * self.largest).mean()


def test_buffers_that_the_forward_updates_are_refused_by_name():
    folded = capture(Counts(), {"x": torch.randn(BATCH, 4)}).graph
    with pytest.raises(OptionError, match="every one of them would update buffer largest"):
        MicrobatchGraphs(folded, CLUSTER, BATCH).graph(2)


class Penalized(nn.Module):
    """A mean over the batch and a penalty on parameters, that may be computed in whole numbers."""

    def __init__(self, offset: torch.Tensor | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.offset = offset

    def forward(self, x):
        y = self.linear(x)
        if self.offset is not None:
            return y.mean() + ((x > 0).sum() + self.offset)
        return y.square().mean() + 0.1 * self.linear.weight.norm()


def test_what_is_added_once_is_shared_among_microbatches():
    model, x = Penalized().double(), torch.randn(BATCH, 4, dtype=torch.float64)
    captured = capture(model, {"x": x})
    written = MicrobatchGraphs(captured.graph, CLUSTER, BATCH).graph(2)
    parameters = dict(model.named_parameters())

    def step(graph, x):
        return captured_step(graph, captured.constants, parameters, {}, {"x": x})

    loss, gradients = step(captured.graph, x)
    halves = [step(written, half) for half in x.chunk(2)]
    assert sum(half for half, _ in halves) == pytest.approx(loss.item(), rel=1e-14)
    for name, gradient in gradients.items():
        torch.testing.assert_close(sum(g[name] for _, g in halves), gradient)


def test_whole_numbers_that_are_added_once_are_refused():
    model = Penalized(torch.tensor(3))
    folded = capture(model, {"x": torch.zeros(BATCH, 4)}).graph
    with pytest.raises(OptionError, match=r"adds .*, whole numbers, to a sum over them"):
        MicrobatchGraphs(folded, CLUSTER, BATCH).graph(2)


class OfSamples(nn.Module):
    """What `mixes` makes of the hidden values of all samples."""

    def __init__(self, mixes):
        super().__init__()
        self.first, self.mixes = nn.Linear(8, 8), mixes

    def forward(self, x, y):
        return self.mixes(self.first(x), y, torch.arange(len(x)))


def contrasted(hidden, y, numbers):
    logits = hidden @ y.T
    rows, columns = (nn.functional.cross_entropy(x, numbers) for x in (logits, logits.T))
    return rows + columns


def looked_up(hidden, y, numbers):
    return nn.functional.embedding(numbers.flip(0), hidden).sum()


def added_up(hidden, y, numbers):
    pairs = torch.stack([numbers, numbers.flip(0)], 1)
    return nn.functional.embedding_bag(pairs, hidden, mode="sum").sum()


@pytest.mark.parametrize(
    ("mixes", "does"),
    [
        (contrasted, "has the samples of the batch for classes"),
        (looked_up, "looks up samples of the batch"),
        (added_up, "looks up samples of the batch"),
    ],
)
def test_tables_and_classes_that_are_samples_are_refused(mixes, does):
    """Microbatches have some of them each."""
    folded = capture(OfSamples(mixes), {"x": torch.zeros(4, 8), "y": torch.zeros(4, 8)}).graph
    with pytest.raises(OptionError, match=rf"test_microbatch.py:\d+\) {does}; plan one microbatch"):
        MicrobatchGraphs(folded, CLUSTER, 4).graph(2)
