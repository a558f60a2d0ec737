"""Copies and collectives of a layer's parameters in a pipeline, as its program will have them."""

from operator import attrgetter

import pytest

from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.cost_models.memory.live_ranges import RegionMemory
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.ir.mesh import Mesh
from meshfold.ir.op_graph import Value
from meshfold.ir.spmd import INVARIANT, Shard
from meshfold.passes.pipeline.parameters import LayerParameters, Parameter
from meshfold.passes.price.parameter_groups import is_unbucketed, parameter_copies
from meshfold.passes.price.parameters import member_copies

SIZES = [(256, 4096), (1024, 4096), (3072, 4096), (4096, 4096), (14336, 4096)]
MESHES = [(2, 8), (8, 8), (4, 4)]
WEIGHT = Value((14336, 4096), "bfloat16", True)
MASTER = Value((14336, 4096), "bfloat16", True, master="float32")


def stages(pp: int, dp: int, replicas: int = 1) -> tuple[Mesh, CostModel]:
    """The mesh of one stage, and costs on the mesh of all."""
    cluster = resolve_cluster("dgx-h100", pp * dp)
    mesh = build_mesh(cluster, pp=pp, dp=dp, tp=1, replicas=replicas)
    own = Mesh(tuple(axis for axis in mesh.axes if axis.name != "pp"))
    return own, CostModel(cluster, mesh)


def placed(value: Value, zero: int, pp: int = 2, dp: int = 8) -> LayerParameters:
    return LayerParameters([Parameter(value, (), (), 1)], zero, *stages(pp, dp), "adamw", pp)


@pytest.mark.parametrize(("pp", "dp"), MESHES)
@pytest.mark.parametrize("shape", SIZES)
def test_the_search_and_the_program_agree_who_is_alone(
    shape: tuple[int, int], pp: int, dp: int
) -> None:
    value = Value(shape, "bfloat16", True)
    _, costs = stages(pp, dp)
    layout = tuple(Shard(0) if name == "dp" else INVARIANT for name in costs.mesh.names)
    gather = (costs.mesh.index("dp"),)
    wanted = parameter_copies(value, layout, gather, costs)
    found = placed(value, 3, pp, dp)
    assert found.copies_forward_s == pytest.approx(wanted.gathered_s)
    assert found.copies_backward_s == pytest.approx(wanted.gathered_s + wanted.reduced_s)
    assert is_alone(value, pp, dp) == is_unbucketed(value, layout, gather, costs)


def is_alone(value: Value, pp: int, dp: int) -> bool:
    """Whether a second parameter like it has a bucket of its own."""
    twice = LayerParameters([Parameter(value, (), (), 1)] * 2, 3, *stages(pp, dp), "adamw", pp)
    return len(list(twice.buckets("all_gather"))) == 2


def test_both_answers_are_among_the_cases() -> None:
    found = {is_alone(Value(s, "bfloat16", True), *m) for s in SIZES for m in MESHES}
    assert found == {True, False}


def test_casts_of_masters_are_those_that_run() -> None:
    """A program without dp casts the whole parameter for every forward and backward."""
    _, costs = stages(2, 8)
    whole = member_copies(MASTER, (INVARIANT, INVARIANT), (), costs)
    layout, gather = (INVARIANT, Shard(0)), (1,)
    part = parameter_copies(MASTER, layout, gather, costs)
    shared = member_copies(MASTER, layout, gather, costs)
    assert whole.packed_s > 4 * part.packed_s > 0
    none, once, every, always = (placed(MASTER, zero) for zero in (0, 1, 2, 3))
    assert (none.copies_forward_s, none.copies_backward_s, none.copies_once_s) == pytest.approx(
        (0, 0, 0)
    )
    for found, reduced in ((once, shared), (every, part)):
        assert found.copies_forward_s == pytest.approx(-whole.packed_s)
        added_s = reduced.reduced_s - whole.reduced_s
        assert found.copies_backward_s == pytest.approx(added_s - whole.packed_s)
        assert found.copies_once_s == pytest.approx(part.gathered_s)
    assert always.copies_forward_s == pytest.approx(part.gathered_s - whole.packed_s)
    assert always.copies_once_s == 0


@pytest.mark.parametrize("value", [WEIGHT, MASTER], ids=["bf16", "master"])
def test_who_is_alone_has_collectives_of_its_own(value: Value) -> None:
    mesh, costs = stages(2, 8)
    small = Value((4096,), "bfloat16", True, master=value.master)
    parameters = [Parameter(v, (), (), 1) for v in (value, value, small, small)]
    found = LayerParameters(parameters, 3, mesh, costs, "adamw", 2)
    wide = 2 if value.master else 1
    large, rest = 2 * 14336 * 4096, 2 * 2 * 4096
    assert list(found.buckets("all_gather")) == [(("dp",), n) for n in (large, large, rest)]
    scattered = [(("dp",), wide * n) for n in (large, large, rest)]
    assert list(found.buckets("reduce_scatter")) == scattered
    assert found.num_bytes("reduce_scatter") == wide * (2 * large + rest)


def test_layers_of_one_stage_share_what_they_all_read() -> None:
    """A parameter of 1001 numbers that six layers read: in all of them once, and a byte at most for
    each that is rounded up. Stages may have it each."""
    value = Value((1001,), "float32", True)
    for dp, zero in ((1, 0), (8, 0), (8, 1), (8, 3)):
        mesh, costs = stages(1, dp)
        shared, unsure, several = (
            LayerParameters(
                [Parameter(value, (), (), 6, least)], zero, mesh, costs, "adamw", num_stages
            )
            for least, num_stages in ((6, 1), (1, 1), (6, 2))
        )
        names = ("stored", "trained.updated", "trained.copied", "gradients")
        # Ranks reduce the gradient of each use by itself; one rank adds them up in the parameter.
        once = names[: 3 + (dp == 1)]
        for name in names:
            of = attrgetter(name)
            assert of(shared) == (668 if name in once else 4004)
            # Where fewer layers may read it nothing is left out.
            assert of(unsure) == of(several) == 4004
        assert 6 * 667 < 4004 <= 6 * 668
        reduced = list(shared.buckets("all_reduce", is_once=True))
        assert reduced == ([(("dp",), 4004)] if dp > 1 else [])
        assert shared.tied == [] and several.tied == [(4004, 6)]


def test_gradients_that_are_final_with_every_backward_leave_with_it() -> None:
    """Not those that are added up over microbatches, or cast, and reduced once; nor of a parameter
    that another layer reads."""
    value, wide = (
        Value((1000,), "float32", True),
        Value((1000,), "bfloat16", True, master="float32"),
    )

    def leaving(dp: int, zero: int, value: Value = value, holders: int = 1) -> tuple[int, int]:
        parameter = Parameter(value, (), (), holders)
        found = LayerParameters([parameter], zero, *stages(2, dp), "adamw", 2)
        assert found.trained == (found.alone if holders == 1 else found.also_elsewhere)
        return found.leaving, found.gradients

    assert leaving(1, 0) == (4000, 4000) and leaving(8, 0) == leaving(8, 1) == (0, 4000)
    assert leaving(8, 2) == leaving(8, 3) == (500, 500)
    assert leaving(1, 0, wide) == (0, 4000) and leaving(8, 3, wide) == (500, 500)
    assert leaving(1, 0, holders=2) == (0, 4000)


@pytest.mark.parametrize(
    ("zero", "replicas", "alone", "several"),
    [
        (0, 1, 24, 8),  # its gradient; alone a bucket and what comes out of it
        (1, 1, 17, 9),  # and eighths that come out
        (2, 1, 17, 17),  # reduced with every microbatch
        (3, 1, 25, 25),  # and gathered for it
        (3, 2, 28, 28),  # and shards of four ranks that two replicas add up
    ],
)
def test_what_a_layer_works_with(zero: int, replicas: int, alone: int, several: int) -> None:
    """In eighths of a weight. One microbatch packs its gradients; several reduce sums in place."""
    mesh, costs = stages(2, 8, replicas)
    found = LayerParameters([Parameter(WEIGHT, (), (), 1)], zero, mesh, costs, "adamw", 2)
    eighth = WEIGHT.num_bytes // 8
    memory = RegionMemory(0, frozenset(), (), (), (), 0, 0, 0, (WEIGHT.num_bytes,))
    assert found.workspace_bytes(memory, is_only=True) == alone * eighth
    assert found.workspace_bytes(memory, is_only=False) == several * eighth


@pytest.mark.parametrize("zero", range(4))
def test_what_is_sent_once_a_step_and_what_with_every_microbatch(zero: int) -> None:
    """By the table of the module, two parameters that share their buckets."""
    small = Value((4096, 2), "bfloat16", True)
    parameters = [Parameter(small, (), (), 1)] * 2
    found = LayerParameters(parameters, zero, *stages(2, 8), "adamw", 2)
    kinds = "all_gather", "reduce_scatter", "all_reduce"
    sent = {(k, o): found.num_bytes(k, is_once=o) for k in kinds for o in (False, True)}
    both = 2 * 4096 * 2 * 2
    wanted = {
        0: {("all_reduce", True)},
        1: {("all_gather", True), ("reduce_scatter", True)},
        2: {("all_gather", True), ("reduce_scatter", False)},
        3: {("all_gather", False), ("reduce_scatter", False)},
    }
    assert {key: n for key, n in sent.items() if n} == dict.fromkeys(wanted[zero], both)


@pytest.mark.parametrize("value", [WEIGHT, MASTER], ids=["own dtype", "master"])
def test_gradients_of_microbatches_are_added_up_where_they_are(value: Value) -> None:
    """Of shards, under ZeRO 2 and 3, both are read and the sum is written. Whole gradients, under
    ZeRO 0 and 1, are added where the first ones were copied to: beyond the copy the sum is read.
    None of those that leave for the host are added up."""
    rows, columns = value.shape
    num_bytes = rows * columns * (4 if value.master else 2)
    _, costs = stages(2, 8)
    for zero, shards in enumerate((1, 1, 8, 8)):
        found = placed(value, zero)
        assert found.gradients == num_bytes // shards
        moved = num_bytes if zero < 2 else 3 * num_bytes // shards
        added_s = costs.compute_s(0.0, moved, value.stored_dtype)
        assert found.added_s == added_s - (costs.launch_s if zero < 2 else 0.0)
        assert found.left_s == (found.added_s if zero < 2 else 0.0)
        assert bool(found.leaving) == (zero > 1)
