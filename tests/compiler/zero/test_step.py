"""Gathers ahead, reductions behind, memory of gathered parameters, one backward per step."""

import re
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.models.recompute import emit_recomputed
from support.programs.local_programs import (
    Rank,
    capture,
    emit_uniform,
    gradients,
    local_part,
    on_ranks,
    stack_model,
)
from torch import Tensor, nn

from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.errors import MeshfoldError
from meshfold.ir.strategy import UniformStrategy
from meshfold.zero.parameter_group import GroupBuffers
from meshfold.zero.step import GroupUse

ZERO3 = UniformStrategy(dp=2, zero=3)
DP = UniformStrategy(dp=2)
NUM_LAYERS = 4


def zero3_stack(**sizes: int) -> tuple[nn.Module, dict[str, Tensor], Any, EmittedProgram]:
    model, batch = stack_model(NUM_LAYERS, **sizes)
    captured = capture(model, batch)
    return model, batch, captured, emit_uniform(captured, ZERO3, len(batch["x"]))


def layers_of(program: EmittedProgram) -> list[int]:
    """Instances that gather parameters, in order."""
    return [k for k in range(len(program.programs)) if program.region_of(k).materializes_parameters]


class Traced(nn.Module):
    """A region graph that writes its forward and backward into a log."""

    def __init__(self, graph: nn.Module, log: list[Any]) -> None:
        super().__init__()
        self.graph = graph
        self.log = log

    def forward(self, mesh: Any, ahead: Any, instance: int, *values: Any) -> Any:
        self.log.append(("forward", instance))
        outputs = self.graph(mesh, ahead, instance, *values)
        for out in outputs:
            if isinstance(out, Tensor) and out.requires_grad:
                out.register_hook(lambda _: self.log.append(("backward", instance)))
        self.log.append(("end", instance))
        return outputs


def traced_run(program: EmittedProgram, rank: Rank, batch: dict[str, Tensor]) -> list[Any]:
    """What one rank does in a step: its parameter collectives ("all_gather", size), the regions
    that begin forward or backward, the forwards that end."""
    log: list[Any] = []
    for kind in ("all_gather", "reduce_scatter"):
        setattr(rank.mesh, f"start_{kind}", _logged(rank.mesh, kind, log))
    regions = tuple(replace(r, graph=Traced(r.graph, log)) for r in program.regions)  # type: ignore[arg-type]
    runner = rank.runner
    runner.program = replace(program, regions=regions)
    instances = map(runner.program.instance, range(len(program.programs)))
    runner.training_modes = tuple(map(runner.training_mode, instances))
    rank.loss(batch).backward()
    return log


def _logged(mesh: Any, kind: str, log: list[Any]) -> Any:
    start = getattr(mesh, f"start_{kind}")

    def logged(x: Tensor, axes: Any) -> Tensor:
        if x.dim() == 1:  # groups are flat, activations are not
            log.append((kind, len(x)))
        return start(x, axes)

    return logged


@pytest.fixture(scope="module", params=["none", "full"])
def zero3_log(request: pytest.FixtureRequest) -> tuple[EmittedProgram, list[Any]]:
    model, batch, captured, program = zero3_stack()
    if request.param == "full":
        program = emit_recomputed(program)
    logs = on_ranks(model, captured, program, lambda rank: traced_run(program, rank, batch))
    assert logs[0] == logs[1], "the order of collectives is the same on all ranks"
    return program, logs[0]


def test_gathers_start_before_the_ops_of_the_region_before(zero3_log: Any) -> None:
    program, log = zero3_log
    layers = layers_of(program)
    assert len(layers) == NUM_LAYERS
    gathers = [i for i, entry in enumerate(log) if entry[0] == "all_gather"]
    # In forward the k-th gather is that of the k-th layer.
    for gather, layer in zip(gathers[1:NUM_LAYERS], layers[1:], strict=True):
        before = layers[layers.index(layer) - 1]
        assert log.index(("forward", before)) < gather < log.index(("end", before))


def test_gathers_are_waited_for_at_first_use_and_start_ahead_comes_next(zero3_log: Any) -> None:
    program, _ = zero3_log
    region = next(r for r in program.regions if r.materializes_parameters)
    text = program.text(0).split(f"region {region.name}:")[1]
    calls = re.findall(r"^    \w+ = ([\w.]+)\(", text, flags=re.MULTILINE)
    wait = calls.index("wait_group")
    members = len(region.groups[0].members)
    assert calls[wait + 1 : wait + 1 + members] == ["getitem"] * members
    assert calls[wait + 1 + members] == "start_ahead"
    assert calls[wait + 2 + members].startswith("aten.")


def test_reductions_start_before_the_backward_of_the_region_before(zero3_log: Any) -> None:
    program, log = zero3_log
    layers = layers_of(program)
    reductions = [i for i, entry in enumerate(log) if entry[0] == "reduce_scatter"]
    assert len(reductions) == NUM_LAYERS
    for reduction, layer in zip(reductions, reversed(layers), strict=True):
        assert log.index(("backward", layer)) < reduction
        if layer != layers[0]:
            assert reduction < log.index(("backward", layers[layers.index(layer) - 1]))


def test_backward_gathers_one_region_ahead_and_keeps_the_last(zero3_log: Any) -> None:
    program, log = zero3_log
    layers = layers_of(program)
    gathers = [i for i, entry in enumerate(log) if entry[0] == "all_gather"][NUM_LAYERS:]
    # All but the last layer are gathered again, each before the layer after it runs backward.
    assert len(gathers) == NUM_LAYERS - 1
    for gather, layer in zip(gathers[1:], reversed(layers[:-2]), strict=True):
        assert gather < log.index(("backward", layer))
    second = [i for i, entry in enumerate(log) if entry[0] == "reduce_scatter"]
    for gather, reduction in zip(gathers[1:], second[1:-1], strict=True):
        assert gather < reduction, "the gather is in flight while a layer runs backward"


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_gathered_parameters_are_two_regions_at_most(
    recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch, captured, program = zero3_stack(width=16)
    if recompute == "full":
        program = emit_recomputed(program)
    live: dict[int, dict[int, int]] = {}
    peaks: dict[int, int] = {}
    unpack = GroupBuffers.unpack_unsharded

    def note(rank: int, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        mine = live.setdefault(rank, {})
        key = storage.data_ptr()
        if key not in mine:
            mine[key] = storage.nbytes()
            weakref.finalize(storage, mine.pop, key).atexit = False
        peaks[rank] = max(peaks.get(rank, 0), sum(mine.values()))

    def body(rank: Rank) -> int:
        start = rank.mesh.start_all_gather

        def start_all_gather(x: Tensor, axes: Any) -> Tensor:
            flat = start(x, axes)
            note(rank.mesh.rank, flat)
            return flat

        rank.mesh.start_all_gather = start_all_gather  # type: ignore[method-assign]
        rank.loss(batch).backward()
        return sum(live[rank.mesh.rank].values())

    def unpack_unsharded(self: GroupBuffers, flat: Tensor) -> list[Tensor]:
        whole = unpack(self, flat)
        rank = next(r for r, m in live.items() if flat.untyped_storage().data_ptr() in m)
        for tensor in whole:
            note(rank, tensor)
        return whole

    monkeypatch.setattr(GroupBuffers, "unpack_unsharded", unpack_unsharded)
    left = on_ranks(model, captured, program, body)
    layer_bytes = sum(p.numel() * p.element_size() for p in model.layers[0].parameters())
    assert left == [0, 0], "nothing gathered is left after backward"
    assert max(peaks.values()) == 2 * layer_bytes


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_zero_2_gathers_once_and_lets_go_region_by_region(
    recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = stack_model(NUM_LAYERS)
    captured = capture(model, batch)
    program = emit_uniform(captured, UniformStrategy(dp=2, zero=2), len(batch["x"]))
    if recompute == "full":
        program = emit_recomputed(program)
    left = []
    release = GroupUse.start_reduction

    def start_reduction(use: GroupUse, gradients: Any) -> None:
        release(use, gradients)
        if use._step.mesh.rank == 0:
            left.append(sum(bool(u._unsharded) for uses in use._step.uses for u in uses))

    monkeypatch.setattr(GroupUse, "start_reduction", start_reduction)
    log = on_ranks(model, captured, program, lambda rank: traced_run(program, rank, batch))[0]
    kinds = [entry[0] for entry in log if entry[0] in ("all_gather", "reduce_scatter")]
    assert kinds == ["all_gather"] * NUM_LAYERS + ["reduce_scatter"] * NUM_LAYERS
    assert left == list(reversed(range(NUM_LAYERS)))


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("tp", [1, 2])
def test_zero_1_and_2_have_the_gradients_of_one_process(zero: int, tp: int, recompute: str) -> None:
    model, batch = stack_model(NUM_LAYERS)
    captured = capture(model, batch)
    program = emit_uniform(captured, UniformStrategy(dp=2, tp=tp, zero=zero), len(batch["x"]))
    if recompute == "full":
        program = emit_recomputed(program)
    expected = gradients(model, batch)

    def worst(rank: Rank) -> float:
        rank.loss(batch).backward()
        return max(
            float((p.grad - local_part(program, n, expected[n], rank.mesh)).abs().max())
            for n, p in rank.parameters.items()
            if p.grad is not None
        )

    assert max(on_ranks(model, captured, program, worst)) < 1e-14


def test_a_step_runs_backward_once() -> None:
    model, batch, captured, program = zero3_stack()

    def body(rank: Rank) -> str:
        loss = rank.loss(batch)
        loss.backward(retain_graph=True)
        with pytest.raises(MeshfoldError, match="already run backward") as caught:
            loss.backward()
        return str(caught.value)

    on_ranks(model, captured, program, body)


@pytest.mark.parametrize("strategy", [DP, ZERO3], ids=lambda s: s.label)
def test_gradients_accumulate_over_steps(strategy: UniformStrategy) -> None:
    model, batch = stack_model(NUM_LAYERS)
    captured = capture(model, batch)
    program = emit_uniform(captured, strategy, 4)
    expected = gradients(model, batch)

    def body(rank: Rank) -> float:
        rank.loss(batch).backward()
        (rank.loss(batch) + rank.loss(batch)).backward()
        return max(
            float((p.grad - 3 * local_part(program, n, expected[n], rank.mesh)).abs().max())
            for n, p in rank.parameters.items()
        )

    assert max(on_ranks(model, captured, program, body)) < 1e-14


def test_a_forward_without_gradients_gathers_once_and_keeps_nothing() -> None:
    model, batch, captured, program = zero3_stack()

    def body(rank: Rank) -> tuple[float, int]:
        log: list[Any] = []
        rank.mesh.start_all_gather = _logged(rank.mesh, "all_gather", log)  # type: ignore[method-assign]
        with torch.no_grad():
            return float(rank.loss(batch)), len(log)

    expected = float(model(**batch).detach())
    for loss, num_gathers in on_ranks(model, captured, program, body):
        assert loss == pytest.approx(expected, abs=1e-15)
        assert num_gathers == NUM_LAYERS


def test_frozen_parameters_get_no_gradient_and_no_reduction() -> None:
    model, batch = stack_model(NUM_LAYERS)
    for layer in model.layers:
        layer.up.requires_grad_(False)
    captured = capture(model, batch)
    program = emit_uniform(captured, ZERO3, 4)
    expected = gradients(model, batch)

    def body(rank: Rank) -> float:
        for name, parameter in rank.parameters.items():
            parameter.requires_grad_("up" not in name)
        rank.loss(batch).backward()
        assert all((p.grad is None) == ("up" in n) for n, p in rank.parameters.items())
        return max(
            float((p.grad - local_part(program, n, expected[n], rank.mesh)).abs().max())
            for n, p in rank.parameters.items()
            if p.grad is not None
        )

    assert max(on_ranks(model, captured, program, body)) < 1e-14


def test_saved_activations_do_not_outlive_the_loss() -> None:
    model, batch, captured, program = zero3_stack()
    kept: list[weakref.ref[Tensor]] = []

    def body(rank: Rank) -> None:
        loss = rank.loss(batch)
        kept.append(weakref.ref(loss))

    on_ranks(model, captured, program, body)
    assert [ref() for ref in kept] == [None, None]
