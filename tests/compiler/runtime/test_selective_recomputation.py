"""Regions of which the backward runs a part again: the same numbers, what is kept runs once."""

import weakref
from collections import Counter
from dataclasses import replace

import pytest
import torch
from support.models.hugging_face import families, tiny_model
from support.models.recompute import (
    captured_dropping,
    dropping_model,
    emit_recomputed,
    plain_program,
)
from support.processes.pool import Pools
from support.programs.local_programs import (
    Rank,
    capture,
    emit_uniform,
    errors_of_a_step,
    on_ranks,
)
from support.programs.local_programs import stack_model as stack
from support.programs.one_device import difference
from support.programs.schedules import PINS, captured_family, matrix, plan_text
from torch import Tensor

from meshfold.api import plan_captured
from meshfold.codegen.emit.pipeline import emit_plan
from meshfold.codegen.program.emitted import ORIGIN, EmittedProgram, RegionProgram
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.errors import MeshfoldError
from meshfold.ir.options import CompileOptions
from meshfold.ir.strategy import KeptResults, UniformStrategy
from meshfold.validation.float64_mode import float64_everywhere

pytestmark = pytest.mark.xdist_group("recomputation")

EXACT = 1e-12
ALONE = UniformStrategy()
ZERO3 = UniformStrategy(dp=2, zero=3)
TP_SP = UniformStrategy(tp=2, sequence_parallel=True)
EP = UniformStrategy(ep=2)


def step_of(family: str, program: EmittedProgram) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Loss and gradients of a step with dropout, by rank."""
    model, batch = dropping_model(family)

    def body(rank: Rank) -> tuple[Tensor, dict[str, Tensor]]:
        loss = rank.loss(batch, (5, 7))
        loss.backward()
        found = {n: p.grad for n, p in rank.parameters.items() if p.grad is not None}
        return loss.detach(), found

    return on_ranks(model, captured_dropping(family), program, body)


def keeping(program: EmittedProgram, share: int) -> EmittedProgram:
    """The program with every `share`-th op kept, and the conversions of every `share`-th value; all
    with 1, none with 0: whatever a plan keeps is right."""

    def kept(region: RegionProgram) -> KeptResults:
        origins = {n.meta[ORIGIN] for n in region.graph.graph.nodes if ORIGIN in n.meta}
        steps = {(o[0], o[1].after) for o in origins if not isinstance(o, int)}
        return KeptResults(
            tuple(k for k in range(len(region.ops.ops)) if share and k % share == 0),
            tuple(sorted((v, x) for v, x in steps if share and v % share == 0)),
        )

    regions = tuple(
        replace(
            region,
            recompute="selective",
            typing=replace(region.typing, recompute="selective", kept=kept(region)),
        )
        for region in program.regions
    )
    return replace(program, regions=regions)


def assert_same(family: str, strategy: UniformStrategy, program: EmittedProgram) -> None:
    """Bit for bit as without recomputation."""
    pairs = zip(
        step_of(family, program), step_of(family, plain_program(family, strategy)), strict=True
    )
    for (loss, gradients), (expected_loss, expected) in pairs:
        assert torch.equal(loss, expected_loss) and gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            assert torch.equal(gradients[name], gradient), name


@pytest.mark.parametrize("family", families("gpt2", "llama"))
@pytest.mark.parametrize("strategy", [ALONE, ZERO3, TP_SP], ids=lambda s: s.label)
def test_a_step_is_the_same_with_what_is_cheapest_recomputed(
    family: str, strategy: UniformStrategy
) -> None:
    """With dropout and tied weights."""
    program = emit_recomputed(plain_program(family, strategy), recompute="selective")
    assert_same(family, strategy, program)


@pytest.mark.parametrize("share", [0, 1, 2, 3])
def test_a_step_is_the_same_whatever_is_kept(share: int) -> None:
    assert_same("gpt2", TP_SP, keeping(plain_program("gpt2", TP_SP), share))


@pytest.mark.parametrize("share", [0, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_experts_are_dispatched_the_same_whatever_is_kept(share: int) -> None:
    """Counts that ranks exchanged are replayed where the exchange runs again."""
    assert_same("mixtral", EP, keeping(plain_program("mixtral", EP), share))


SELECTIVE = [case for case in matrix("llama") if "selective" in str(case.values[1])]


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(("family", "pins"), SELECTIVE)
def test_on_processes_scheduled(pools: Pools, family: str, pins: str) -> None:
    arguments = family, captured_family(family), plan_text(family, pins)
    found = pools.run(PINS[pins][0], "support.programs.emit:compare_step", *arguments)
    for loss_error, gradient_error, name, uneven in found:
        assert loss_error < EXACT and gradient_error < EXACT, name
        assert not uneven


@pytest.mark.parametrize("pins", ["zero3 x tp+sp, selective"])
@pytest.mark.parametrize("parts", [1, 2])
def test_in_micro_chunks_and_as_collective_matmuls(pins: str, parts: int) -> None:
    """What is kept of a region is kept of what is written in its place."""
    num_ranks, fixed = PINS[pins]
    model, batch = tiny_model("llama")
    more = {"micro_chunks": parts} if parts > 1 else {"collective_matmul": 1}
    plan = plan_captured(
        captured_family("llama"),
        "llama",
        resolve_cluster("local-cpu", num_ranks),
        CompileOptions(pins={**fixed, **more}, mode="scheduled"),
    )
    assert any(r.collective_matmul or r.chunking.count > 1 for r in plan.regions)
    with float64_everywhere():
        program = emit_plan(captured_family("llama").graph, plan)
        assert isinstance(program, EmittedProgram)
        found = errors_of_a_step(model, batch, captured_family("llama"), program)
    assert max(max(errors.values()) for errors in found) < EXACT


@pytest.mark.parametrize("recompute", ["light", "selective", "heavy"])
def test_stages_on_one_device(recompute: str) -> None:
    model, batch = stack(4)
    assert difference(model, batch, 2, 2, {"recompute": recompute}) < EXACT


def test_collectives_whose_results_are_kept_do_not_run_again() -> None:
    plain = plain_program("llama", TP_SP)

    def collectives(program: EmittedProgram) -> Counter[str]:
        model, batch = dropping_model("llama")

        def body(rank: Rank) -> Counter[str]:
            rank.loss(batch).backward()
            return Counter(kind for kind, _ in rank.mesh.log)

        first, second = on_ranks(model, captured_dropping("llama"), program, body)
        assert first == second
        return first

    without = collectives(plain)
    assert collectives(keeping(plain, 1)) == without
    assert collectives(keeping(plain, 0)) - without == collectives(emit_recomputed(plain)) - without


def test_the_program_says_what_is_kept() -> None:
    """Ranks that keep other results would run other collectives: the digest tells them apart."""
    plain = plain_program("llama", TP_SP)
    programs = [keeping(plain, share) for share in (0, 2, 3)]
    assert "; runs again in backward but for ops none\n" in programs[0].text(0)
    assert "; runs again in backward but for ops 0 2 4 " in programs[1].text(0)
    assert len({program.digest for program in (plain, *programs)}) == 4


@pytest.mark.parametrize("share", [0, 1])
def test_what_arrives_must_not_change_before_backward(share: int) -> None:
    model, batch = stack(4)
    found = capture(model, batch)
    program = keeping(emit_uniform(found, ALONE, 4), share)

    def body(rank: Rank) -> None:
        loss = rank.loss(batch)
        with torch.no_grad():
            for parameter in rank.parameters.values():
                parameter.add_(1.0)
        with pytest.raises(MeshfoldError, match="changed in place between forward and backward"):
            loss.backward()

    on_ranks(model, found, program, body)


def test_nothing_outlives_the_loss() -> None:
    model, batch = stack(4, dropout=0.5)
    found = capture(model, batch)
    program = keeping(emit_uniform(found, ZERO3, 4), 2)
    losses: list[weakref.ref[Tensor]] = []
    on_ranks(model, found, program, lambda rank: losses.append(weakref.ref(rank.loss(batch))))
    assert [ref() for ref in losses] == [None, None]


def test_dropout_draws_the_same_numbers_in_both_modes() -> None:
    model, batch = dropping_model("gpt2")
    pins = {"dp": 1, "tp": 2, "sp": 1, "recompute": "selective"}
    found = []
    for mode in ("eager", "scheduled"):
        plan = plan_captured(
            captured_dropping("gpt2"),
            "m",
            resolve_cluster("local-cpu", 2),
            CompileOptions(pins=pins, mode=mode),  # type: ignore[arg-type]
        )
        with float64_everywhere():
            program = emit_plan(captured_dropping("gpt2").graph, plan)
            assert isinstance(program, EmittedProgram)
            found.append(step_of("gpt2", program))
    for (eager_loss, eager), (scheduled_loss, scheduled) in zip(*found, strict=True):
        assert torch.equal(eager_loss, scheduled_loss)
        for name, gradient in eager.items():
            assert torch.allclose(gradient, scheduled[name], rtol=1e-11, atol=EXACT)
