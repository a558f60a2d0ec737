"""Moments of a chain: no program needs less at its peak than they add up to."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
from support.models.hugging_face import families
from support.search.mesh_planners import planner

from meshfold.passes.one_pass import moments
from meshfold.passes.one_pass.chain import CandidateChain
from meshfold.passes.one_pass.moments import Moment, Moments, together
from meshfold.passes.one_pass.search import MeshPlanner

LAYERS = 5
DRAWS = 12


def bytes_at(chain: CandidateChain, moment: Moment, picks: list[int]) -> int:
    """What a program needs at a moment; picks: the candidate of each instance."""
    total, at = chain.fixed_bytes, 0
    for region, _, count, layer_bytes in moment:
        total += sum(layer_bytes(chain.everything[region][k], region) for k in picks[at:][:count])
        at += count
    assert at == len(picks)
    return total


def programs(of: MeshPlanner, chain: CandidateChain, seed: int):
    """Candidates of all instances: each layer another, or few that many layers share."""
    draw = random.Random(seed)
    regions = [instance.region for instance in of.folded.instances]
    sizes = [len(candidates) for candidates in chain.everything]
    for k in range(DRAWS):
        if k % 2:
            yield [draw.randrange(sizes[r]) for r in regions]
        else:
            pairs = [draw.choices(range(n), k=2) for n in sizes]
            yield [pairs[r][draw.random() < 0.2] for r in regions]


@pytest.mark.parametrize("family", families("llama", "gpt2"))
@pytest.mark.parametrize(("dp", "tp"), [(4, 1), (2, 2), (1, 4)])
def test_no_program_needs_less_than_a_moment(family: str, dp: int, tp: int) -> None:
    of = planner(family, dp, tp, layers=LAYERS, offloads=True)
    for chain in of.chains:
        held = chain.moments.all()
        for picks in programs(of, chain, seed=dp):
            regions = [instance.region for instance in of.folded.instances]
            assignment = [chain.everything[r][k] for r, k in zip(regions, picks, strict=True)]
            peak = of.price(assignment).memory.peak
            for number, moment in enumerate(held):
                assert bytes_at(chain, moment, picks) <= peak, (number, picks)


def test_nothing_is_gathered_ahead_in_the_last_forward() -> None:
    """A model that ends in a run: the worst of its last layer may be in its forward, after which
    the layer before it gathers. In the backward of a layer in the middle it has gathered."""
    outputs = SimpleNamespace(reach=[1, 1], always=[[0], [0]])
    _, end, *middle = Moments([(0, 0, 1), (1, 1, 4)], outputs).all()  # type: ignore[arg-type]
    counts = [sum(n for _, _, n, f in m if f is moments._bytes_of_next) for m in (end, *middle)]
    assert counts == [0, 1, 1, 1, 1]
    assert all(sum(n for _, _, n, _ in moment) == 5 for moment in (end, *middle))


def test_all_moments_together_have_the_layers_of_each() -> None:
    of = planner("llama", 4, 1, layers=LAYERS)
    (chain,) = of.chains
    every = chain.moments.all()
    layers = together(every)
    assert sum(layers.values()) == len(of.folded.instances)
    for k, moment in enumerate(every):
        for region, is_first, count, layer_bytes in moment:
            same = [
                n
                for (r, first, of_moments), n in layers.items()
                if (r, first, of_moments[k]) == (region, is_first, layer_bytes)
            ]
            assert sum(same) >= count


def test_the_bound_rises_as_memory_falls() -> None:
    of = planner("llama", 4, 1, layers=LAYERS, offloads=True)
    (chain,) = of.chains
    least = of.fixed_bytes
    bounds = []
    for capacity in np.linspace(least, least + 3 * (of.smallest.memory.peak - least), 12):
        chain.capacity_bytes = int(capacity)
        bounds.append(chain._bound_s())
    assert bounds == sorted(bounds, reverse=True) and len(set(bounds)) > 3
