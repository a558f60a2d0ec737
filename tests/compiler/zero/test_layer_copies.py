"""Which copies are on the device while which instance runs."""

from collections.abc import Iterable

import pytest
import torch
from support.models.hugging_face import tiny_model
from support.programs.local_programs import Rank, capture, emit_uniform, on_ranks
from torch import Tensor

from meshfold.codegen.schedule.list_scheduling import scheduled
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.ir.strategy import UniformStrategy
from meshfold.offload.copies import device_copies
from meshfold.offload.host_parameters import HostParameters
from meshfold.runtime.runner import ProgramRunner
from meshfold.zero.host_side import NoHostSide
from meshfold.zero.layer_copies import InstanceCopies


class Host(NoHostSide):
    """held: what was asked for, by value."""

    comes_by_layer = True

    def __init__(self) -> None:
        self.held: list[tuple[list[float], list[float]]] = []

    def has_by_layer(self, shards: Iterable[Tensor]) -> bool:
        return any(shards)

    def hold(self, now: Iterable[Tensor], ahead: Iterable[Tensor] = ()) -> None:
        self.held.append(([float(x) for x in now], [float(x) for x in ahead]))


def test_the_next_instance_that_has_any_is_there_too() -> None:
    host = Host()
    copies = InstanceCopies(host, [[torch.tensor(1.0)], [], [torch.tensor(3.0)]])
    for k in range(3):
        copies.enter(k)
    copies.leave_forward(is_recording=True)
    for k in reversed(range(3)):
        copies.enter(k, is_backward=True)
    copies.leave_forward(is_recording=False)
    ahead = [([1.0], [3.0]), ([], [3.0]), ([3.0], [])]
    back = [([3.0], [1.0]), ([], [1.0]), ([1.0], [])]
    assert host.held == [*ahead, ([3.0], []), *back, ([], [])]


def test_without_a_host_nothing_is_asked() -> None:
    copies = InstanceCopies(NoHostSide(), [[torch.ones(1)]])
    copies.enter(0)
    copies.leave_forward(is_recording=True)
    assert copies.is_empty


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["eager", "scheduled"])
@pytest.mark.parametrize(
    "strategy",
    [
        UniformStrategy(),
        UniformStrategy(dp=2),
        UniformStrategy(dp=2, zero=3),
        UniformStrategy(tp=2, sequence_parallel=True),
        UniformStrategy(dp=2, tp=2, zero=3),
    ],
    ids=lambda x: x.label,
)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_ranks_compute_as_without(family: str, strategy: UniformStrategy, mode: str) -> None:
    """Loss and gradients, bitwise; nothing is left on the device but a tied embedding."""
    model, batch = tiny_model(family)
    captured = capture(model, batch)
    program = emit_uniform(captured, strategy, next(iter(batch.values())).shape[0])
    if mode == "scheduled":
        cluster = resolve_cluster("local-cpu", strategy.dp * strategy.tp)
        program = scheduled(program, CostModel(cluster, program.mesh), 1 << 30)

    def body(rank: Rank) -> tuple[list[str], int, int]:
        loss = rank.loss(batch)
        loss.backward()
        right = {name: p.grad for name, p in rank.parameters.items()}
        for parameter in rank.parameters.values():
            parameter.grad = None
        copies = device_copies([program], rank.parameters, (), rank.parameters)
        host = HostParameters(copies, rank.parameters, torch.device("cpu"), lambda *_: None)
        runner = ProgramRunner(program, rank.mesh, captured.constants, host_side=host)
        parameters = host.on_device(rank.parameters)
        found = runner.run(parameters, rank.buffers, rank.reader.read(batch))
        found.backward()
        assert torch.equal(found, loss)
        now = {name: p.grad for name, p in rank.parameters.items()}
        return (
            [name for name, g in right.items() if not torch.equal(g, now[name])],
            host.by_layer.num_bytes,
            host.num_device_bytes,
        )

    for differ, num_bytes, staying in on_ranks(model, captured, program, body):
        assert (differ, num_bytes) == ([], 0) and (staying > 0) == (family == "gpt2")
