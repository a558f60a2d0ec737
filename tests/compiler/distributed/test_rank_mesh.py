"""ProcessMesh on gloo processes: each collective, and every kind of conversion."""

import contextlib
import itertools
from dataclasses import FrozenInstanceError

import pytest
import torch
from support.graphs.layouts import assert_close, gradient_layout, put_together
from support.graphs.ops import mesh_of
from support.processes.collectives import samples
from support.processes.pool import Pool, Pools

from meshfold.distributed.rank_mesh import ProcessMesh, single_mesh
from meshfold.distributed.step_context import StepContext
from meshfold.ir.mesh import Mesh
from meshfold.ir.spmd import INVARIANT, PARTIAL, REPLICATE, Shard

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.complex64])
def test_collectives(pools: Pools, dtype: torch.dtype) -> None:
    zero, one = pools.run(2, "support.processes.collectives:every_collective", mesh_of(2), dtype)
    assert (zero["input"], one["input"]) == ([0, 1, 2, 3], [10, 11, 12, 13])
    for found in (zero, one):
        assert found["all_gather"] == [0, 1, 2, 3, 10, 11, 12, 13]
        assert found["all_reduce"] == [10, 12, 14, 16]
        assert found.get("maximum", [10, 11, 12, 13]) == [10, 11, 12, 13]
        assert ("maximum" in found) != dtype.is_complex
    assert (zero["reduce_scatter"], one["reduce_scatter"]) == ([10, 12], [14, 16])
    assert (zero["all_to_all"], one["all_to_all"]) == ([0, 1, 10, 11], [2, 3, 12, 13])


def test_masks_are_gathered_and_exchanged(pools: Pools) -> None:
    zero, one = pools.run(
        2, "support.processes.collectives:every_collective", mesh_of(2), torch.bool
    )
    assert zero["all_gather"] == zero["input"] + one["input"]
    assert zero["all_to_all"] == zero["input"][:2] + one["input"][:2]


def test_conversions(pools: Pools) -> None:
    mesh, shape = mesh_of(2), (4, 12)
    types = (INVARIANT, REPLICATE, PARTIAL, Shard(0), Shard(1), Shard(1, 2), Shard(1, 3))
    pairs = [((s,), (t,)) for s, t in itertools.permutations(types, 2)]
    results = pools.run(2, "support.processes.collectives:convert", mesh, shape, pairs)
    x, cotangent = samples(shape)
    for k, (source, target) in enumerate(pairs):
        ys, gradients = (
            [torch.tensor(r[k][i], dtype=torch.float64) for r in results] for i in (0, 1)
        )
        assert_close(put_together(ys, shape, target, mesh), x)
        assert_close(put_together(gradients, shape, gradient_layout(source), mesh), cotangent)


@pytest.mark.parametrize("kind", ["all_gather", "all_reduce", "reduce_scatter", "all_to_all"])
def test_many_may_be_in_flight(kind: str) -> None:
    """torch's all_gather_into_tensor without `out` ends a process here, within a second or two."""
    with contextlib.closing(Pool(2)) as pool:
        many = "support.processes.collectives:many_in_flight"
        assert pool.run(many, mesh_of(2), kind, 2000, 4) == [0, 0]


def test_a_mesh_of_another_size_than_the_job_is_refused(pools: Pools) -> None:
    for message in pools.run(2, "support.processes.collectives:wrong_size"):
        assert message == "the mesh one rank has 1 ranks, the job 2"


@pytest.mark.parametrize("name", ["rank", "device", "microbatch", "wait"])
def test_a_mesh_is_frozen(name: str) -> None:
    mesh = single_mesh(Mesh(()), torch.device("cpu"))
    for frozen in (mesh, ProcessMesh(mesh.mesh, 0, mesh.device, mesh.levels), StepContext(mesh)):
        with pytest.raises(FrozenInstanceError):
            setattr(frozen, name, 0)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.slow
def test_a_collective_without_its_other_rank_ends_in_a_line(kind: str) -> None:
    with contextlib.closing(Pool(2)) as pool:
        said, _ = pool.run(
            "support.processes.groups:wait_for_a_rank_that_stays_away", mesh_of(2), kind
        )
    name = mesh_of(2).names[0]
    assert said == (
        f"RankLostError: rank 0 waited for rank 1 in step 4, region C, {kind} over {name}: "
        "no answer in 1 s; look for the first error of these ranks, or give a longer timeout_s"
    )
