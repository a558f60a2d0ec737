"""When losses make their logits in chunks, and what plans say of it."""

from functools import cache

import pytest
from support.processes.offload import cluster_with_hosts
from support.programs.local_programs import stack_model
from torch import Tensor, nn
from torch.nn import functional

from meshfold.capture.pipeline import capture
from meshfold.codegen.emit.pipeline import emit_plan
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.errors import InfeasibleError, OptionError
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import Plan
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.fold.assemble import fingerprint
from meshfold.passes.planner.check import price_plan
from meshfold.passes.planner.chunked_loss import NEEDS_CHUNKS
from meshfold.passes.planner.find import find_plan_for
from meshfold.passes.planner.offload import NEEDS_OFFLOAD
from meshfold.plan_file.io import plan_from_json, plan_to_json

PROBER = OpProber()
ROWS, WIDTH, CLASSES = 64, 16, 4096


class Head(nn.Module):
    """A head with far more logits than parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.body(x)), labels)


@cache
def graph() -> FoldedGraph:
    _, batch = stack_model(1, WIDTH, ROWS)
    x = batch["x"].float()
    return capture(Head(), {"x": x, "labels": x[:, 0].long()}).graph


def plan(cluster: ClusterSpec | None = None, folded: FoldedGraph | None = None, **options) -> Plan:
    return find_plan_for(
        folded or graph(),
        cluster or resolve_cluster("local-cpu", 1),
        CompileOptions(**options),
        model_name="head",
        batch_size=ROWS,
        probe=PROBER,
    )


def ops_of(found: Plan) -> list[str]:
    return [target for region in found.regions for target in region.op_targets]


LOSS = "meshfold.linear_cross_entropy.default"


def test_what_fits_has_whole_logits() -> None:
    found = plan()
    assert not found.chunked_loss and LOSS not in ops_of(found)


def test_a_pin_is_kept_holds_less_and_takes_longer() -> None:
    pinned = {"microbatches": 1}
    whole, chunked = plan(pins=pinned), plan(pins={**pinned, "chunked_loss": 1})
    assert chunked.chunked_loss and LOSS in ops_of(chunked)
    logits = 4 * ROWS * CLASSES
    # Whole: logits and log_softmax, and its gradient. In chunks: two of an eighth.
    assert whole.memory.peak - chunked.memory.peak > 1.5 * logits
    assert chunked.time.step_s > whole.time.step_s
    # It is a plan for the model as it was captured.
    assert chunked.model == whole.model and whole.model.fingerprint == fingerprint(graph())


def test_a_plan_is_read_emitted_and_priced_again() -> None:
    found = plan_from_json(plan_to_json(plan(pins={"chunked_loss": 1})))
    assert found.chunked_loss
    assert "linear_cross_entropy" in emit_plan(graph(), found).text()
    again = price_plan(graph(), found, PROBER)
    assert again.memory == found.memory and again.time.step_s == pytest.approx(found.time.step_s)


def test_what_does_not_fit_is_made_to_fit_and_says_so() -> None:
    pins = {"microbatches": 1}
    whole, least = plan(pins=pins), plan(pins={**pins, "chunked_loss": 1})
    memory = (whole.memory.peak + least.memory.peak) // 2
    found = plan(pins=pins, memory_bytes=memory)
    assert found.chunked_loss and found.memory.peak <= memory and NEEDS_CHUNKS in found.notes
    (why,) = (note for note in found.notes if note.startswith("fits because: "))
    assert why.startswith("fits because: logits in chunks")
    with pytest.raises(InfeasibleError):
        plan(pins={**pins, "chunked_loss": 0}, memory_bytes=memory)


def test_with_states_on_the_host_too() -> None:
    pins, hosts = {"microbatches": 1}, cluster_with_hosts(1)
    least = plan(hosts, pins={**pins, "chunked_loss": 1, "offload": "optimizer"})
    found = plan(hosts, pins=pins, memory_bytes=least.memory.peak)
    assert found.chunked_loss and {NEEDS_CHUNKS, NEEDS_OFFLOAD} <= set(found.notes)


def test_a_model_without_such_a_loss_cannot_keep_the_pin() -> None:
    model, batch = stack_model(1, WIDTH, ROWS)
    with pytest.raises(OptionError, match="pin chunked_loss=1: no cross entropy"):
        plan(folded=capture(model, batch).graph, pins={"chunked_loss": 1})
