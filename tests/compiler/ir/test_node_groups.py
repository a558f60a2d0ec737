"""Levels of groups by node, and hierarchical all-reduces of gradients on simulated ranks and
processes."""

from collections import Counter
from collections.abc import Generator
from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models.hugging_face import families, tiny_model
from support.processes.pool import Pools
from support.processes.ranks import run_on_simulated_ranks
from support.programs.local_programs import errors_of_a_step
from support.programs.memory import EmittedStep
from support.programs.schedules import captured_family, nodes_of_two

from meshfold.api import plan_captured
from meshfold.codegen.emit.pipeline import emit_plan
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.simulation.step import simulate
from meshfold.distributed.rank_mesh import RankMesh
from meshfold.errors import OptionError
from meshfold.hierarchical_all_reduce import HierarchicalAllReduce, Interleaver
from meshfold.hierarchical_all_reduce.choice import MOST_PIECES
from meshfold.ir.mesh import Mesh, MeshAxis
from meshfold.ir.node_groups import ACROSS_NODES, IN_NODE, NodeLevels, node_levels
from meshfold.ir.options import CompileOptions, Mode
from meshfold.ir.plan import Plan
from meshfold.plan_file.io import plan_from_json, plan_to_json
from meshfold.report.plan_diff import compare_plans
from meshfold.validation.collective_order import collectives_of
from meshfold.validation.float64_mode import float64_everywhere
from meshfold.zero.hierarchical_all_reduce import AllReduces

EXACT = 1e-12


def mesh_of(*sizes: int) -> Mesh:
    return Mesh(tuple(MeshAxis(name, n) for name, n in zip("abc", sizes, strict=False)))


# Levels.


def test_a_digit_is_split_where_a_node_ends() -> None:
    levels = NodeLevels(Mesh((MeshAxis("dp", 4), MeshAxis("tp", 2))), 4)
    assert levels.sizes(("dp",)) == (2, 2)
    assert list(levels.groups(("dp", IN_NODE))) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert list(levels.groups(("dp", ACROSS_NODES))) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert list(levels.groups(("dp",))) == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert levels.sizes(("dp", "tp")) == (4, 2)
    assert levels.sizes(("tp",)) is None


def test_groups_without_levels_are_refused() -> None:
    for levels in (NodeLevels(mesh_of(4, 2), 8), NodeLevels(mesh_of(3, 2), 4)):
        with pytest.raises(ValueError, match="groups of a on .* have no levels, with . ranks a n"):
            levels.groups(("a", IN_NODE))
    spec = resolve_cluster("dgx-a100-80x2")
    odd = replace(spec, groups=(*spec.groups, replace(spec.groups[0], devices_per_node=4)))
    assert node_levels(odd, mesh_of(4, 2)).sizes(("a", "b")) is None


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    node_ranks=st.integers(0, 12),
    data=st.data(),
)
def test_levels_are_those_of_counting(
    sizes: list[int], node_ranks: int, data: st.DataObject
) -> None:
    mesh = mesh_of(*sizes)
    axes = tuple(data.draw(st.lists(st.sampled_from(mesh.names), min_size=1, unique=True)))
    axes = tuple(sorted(axes))
    levels = NodeLevels(mesh, node_ranks)
    found = levels.sizes(axes)
    if found is None:
        return
    ranks, nodes = found
    near, far = (list(levels.groups((*axes, level))) for level in (IN_NODE, ACROSS_NODES))
    for group in mesh.groups(axes):
        counts = Counter(rank // node_ranks for rank in group)
        assert len(counts) == nodes and set(counts.values()) == {ranks}
        own = [g for g in near if set(g) <= set(group)]
        assert sorted(own) == sorted(
            tuple(r for r in group if r // node_ranks == node) for node in counts
        )
        # A place in a node, on all of them.
        places = [g for g in far if set(g) <= set(group)]
        assert sorted(places) == sorted(zip(*sorted(own), strict=True))


@given(inner=st.lists(st.integers(1, 4), min_size=1, max_size=2), outer=st.integers(2, 5))
def test_nodes_that_hold_whole_digits_always_make_levels(inner: list[int], outer: int) -> None:
    mesh, node_ranks = mesh_of(outer, *inner), prod(inner)
    expected = (node_ranks, outer) if node_ranks > 1 else None
    assert NodeLevels(mesh, node_ranks).sizes(mesh.names) == expected


# Interleaver.


def test_steps_of_what_follows_start_while_the_first_go_on() -> None:
    log: list[str] = []

    def steps(name: str) -> Generator[None, None, str]:
        for k in range(3):
            log.append(f"{name}{k}")
            yield
        return name.upper()

    turns: Interleaver[str] = Interleaver()
    running = [steps(name) for name in "xyzu"]
    for one in running:
        turns.begin(one)
    assert log == ["x0", "x1", "y0", "x2", "y1", "z0", "y2", "z1", "u0"]
    assert [turns.finish(one) for one in running] == ["X", "Y", "Z", "U"]
    assert log[9:] == ["z2", "u1", "u2"]


# What runs.

NODES = Mesh((MeshAxis("dp", 4), MeshAxis("tp", 2)))


@pytest.mark.parametrize("num_pieces", [1, 3])
@pytest.mark.parametrize("numel", [24, 25, 31])
@pytest.mark.parametrize("axes", [("dp",), ("dp", "tp")])
def test_sums_are_those_of_flat_all_reduces(
    axes: tuple[str, ...], numel: int, num_pieces: int
) -> None:
    levels = NodeLevels(NODES, 4)

    def run(mesh: RankMesh) -> tuple[list[list[float]], list[tuple[str, tuple[str, ...]]]]:
        hierarchical = HierarchicalAllReduce(levels, numel * 4 // num_pieces)
        reduces = AllReduces(mesh, hierarchical)
        xs = [torch.arange(float(numel)) * (k + 1) + mesh.rank for k in range(3)]
        small = torch.tensor([float(mesh.rank)])
        started = [reduces.start(x.clone(), axes) for x in (*xs, small)]
        sums = [reduces.finish(one).tolist() for one in started]
        return sums, list(mesh.log)  # type: ignore[attr-defined]

    found = run_on_simulated_ranks(NODES, run, node_ranks=4)
    groups = {rank: group for group in NODES.groups(axes) for rank in group}
    for rank, (sums, log) in enumerate(found):
        group = groups[rank]
        for k, x in enumerate(sums[:3]):
            assert x == [len(group) * i * (k + 1) + sum(group) for i in range(numel)]
        assert sums[3] == [sum(group)]
        kinds = [kind for kind, _ in log]
        assert kinds.count("reduce_scatter") == kinds.count("all_gather") == 3 * num_pieces
        assert log.count(("all_reduce", (*axes, ACROSS_NODES))) == 3 * num_pieces
        # The one that is too small for a piece runs whole.
        assert log.count(("all_reduce", axes)) == 1


CASES = {
    "dp4": {"dp": 4, "zero": 0},
    "tp4+sp": {"tp": 4, "sp": 1},
    "dp2 x tp2": {"dp": 2, "tp": 2, "sp": 1, "zero": 0},
    "dp2 x tp4, zero3": {"dp": 2, "tp": 4, "sp": 1, "zero": 3},
}
"""In the last what shards owe to the other ranks of tp is reduced late, across nodes."""


NOTHING_LATE = {"gpt2": "has 2 heads", "vit": "tp owes it no gradient"}
"""Families of which no gradient is left to the other ranks of tp there."""


def planned(family: str, case: str, mode: Mode = "eager", size: str | int = "64B") -> Plan:
    fixed = CASES[case]
    cluster = nodes_of_two(prod(fixed.get(name, 1) for name in ("dp", "tp")))
    options = CompileOptions(pins={**fixed, "hierarchical_all_reduce": size}, mode=mode)
    return plan_captured(captured_family(family), family, cluster, options)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["eager", "scheduled"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", families("gpt2", "llama", without=("t5",)))
def test_gradients_are_those_of_one_process(family: str, case: str, mode: Mode) -> None:
    if case == "dp2 x tp4, zero3" and family in NOTHING_LATE:
        pytest.skip(NOTHING_LATE[family])
    plan = planned(family, case, mode)
    program = emit_plan(captured_family(family).graph, plan)
    assert isinstance(program, EmittedProgram)
    assert plan.events is not None
    assert any(t.collective.axes[-1] == ACROSS_NODES for t in simulate(plan.events).transfers)
    for errors in errors_of_a_step(*tiny_model(family), captured_family(family), program):
        assert max(errors.values()) < EXACT


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("case", ["dp4", "dp2 x tp2"])
def test_the_same_on_processes(pools: Pools, case: str) -> None:
    plan = planned("llama", case)
    arguments = "llama", captured_family("llama"), plan_to_json(plan)
    for loss_error, gradient_error, name, uneven in pools.run(
        4, "support.programs.emit:compare_step", *arguments
    ):
        assert loss_error < EXACT and gradient_error < EXACT, name
        assert not uneven


@pytest.mark.parametrize("case", CASES)
def test_what_is_simulated_is_what_runs(case: str) -> None:
    plan, captured = planned("llama", case), captured_family("llama")
    program = emit_plan(captured.graph, plan)
    assert isinstance(program, EmittedProgram) and plan.events is not None
    model, batch = tiny_model("llama")
    step = EmittedStep(model, captured, program, batch)
    with float64_everywhere(), collectives_of(step.runner.mesh) as calls:
        step.train()
    found = simulate(plan.events).transfers
    levels = (IN_NODE, ACROSS_NODES)
    real = [(c.kind.removesuffix("_in_place"), c.axes) for c in calls if c.axes[-1] in levels]
    simulated = [(t.collective.kind, t.collective.axes) for t in found]
    assert real == [c for c in simulated if c[1][-1] in levels]
    assert real


@pytest.mark.parametrize("size", ["64B", "20kB"])
def test_memory_of_a_step_is_as_simulated(size: str) -> None:
    plan, captured = planned("llama", "dp4", size=size), captured_family("llama")
    program = emit_plan(captured.graph, plan)
    assert isinstance(program, EmittedProgram) and plan.events is not None
    *memory, _ = simulate(plan.events).memory  # without the optimizer, which does not run here
    simulated = max(num_bytes for _, num_bytes in memory) - plan.events.fixed_bytes
    model, batch = tiny_model("llama")
    with float64_everywhere():
        counted = EmittedStep(model, captured, program, batch).counted_peak_bytes()
    assert counted <= 1.05 * simulated


# What is said.


def test_a_plan_says_what_runs_hierarchically() -> None:
    whole, found = (planned("llama", "dp4", size=size) for size in (0, "1kB"))
    assert (whole.hierarchical_all_reduce_bytes, found.hierarchical_all_reduce_bytes) == (0, 1000)
    assert plan_from_json(plan_to_json(found)) == found
    (row,) = [d for d in compare_plans(whole, found).choices if "hierarchical" in d.what]
    assert (row.first, row.second) == ("none", "in pieces of 1.00 kB")
    program = emit_plan(captured_family("llama").graph, found)
    text = program.text(3)
    assert "group dp x in-node: 2 ranks 2, 3" in text
    assert "group dp x across-nodes: 2 ranks 1, 3" in text
    assert "hierarchical all-reduces of gradients by nodes of 2, in pieces of 1000 bytes" in text
    assert "hierarchical" not in emit_plan(captured_family("llama").graph, whole).text(3)


def test_there_are_no_more_pieces_than_help() -> None:
    hierarchical = HierarchicalAllReduce(NodeLevels(NODES, 4), 100)
    found = [hierarchical.split(("dp",), n) for n in (99, 100, 399, 100 * MOST_PIECES, 10**9)]
    assert [c and c.pieces for c in found] == [None, 1, 3, MOST_PIECES, MOST_PIECES]
    assert hierarchical.split(("tp",), 10**9) is None


def test_a_pin_that_has_no_use_is_refused() -> None:
    options = CompileOptions(pins={"dp": 2, "hierarchical_all_reduce": "1MB"})
    with pytest.raises(
        OptionError, match="pin hierarchical_all_reduce: the ranks of dp2 do not lie on several"
    ):
        plan_captured(captured_family("llama"), "llama", "local-cpux2", options)
    with pytest.raises(
        OptionError, match="pin hierarchical_all_reduce=all: no size; write one, as 25MB, or 0"
    ):
        CompileOptions(pins={"hierarchical_all_reduce": "all"})
