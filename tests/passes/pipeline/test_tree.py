"""Which pipelines are offered: context parallel beside stages."""

from typing import Any

from meshfold.passes.one_pass.tree import CONTEXT, SearchSpec
from meshfold.passes.pipeline.tree import PipelineTree, grow_pipelines


def pipelines(batch_size: int, **other: Any) -> PipelineTree:
    """Of eight layers on eight devices, sequences of 96."""
    given: dict[str, Any] = {"pins": {}, "sequences": (96,), "devices_per_node": 8} | other
    spec = SearchSpec(num_devices=8, batch_size=batch_size, **given)
    return grow_pipelines(spec, 8)


def cps(found: PipelineTree) -> set[int]:
    return {d.cp for d in found.candidates}


def test_cp_is_pruned_where_the_batch_can_be_sharded_over_all() -> None:
    found = pipelines(8)
    assert cps(found) == {1} and found.pruned[CONTEXT] > 0
    assert found.num_strategies == sum(map(found.num_kinds, found.candidates)) + sum(
        found.pruned.values()
    )


def test_few_sequences_are_sharded_themselves() -> None:
    found = pipelines(2)
    assert cps(found) > {1}
    for d in found.candidates:
        assert d.cp == 1 or 2 % (d.dp * d.cp * d.pp)
    assert any(d.pp == d.cp == 2 and d.microbatches == 2 for d in found.candidates)


def test_cp_is_offered_where_it_is_pinned_or_its_rule_is_off() -> None:
    pinned = pipelines(8, pins={"cp": 2})
    assert cps(pinned) == {2} and CONTEXT not in pinned.pruned
    assert cps(pipelines(8, switched_off=(CONTEXT,))) == {1, 2, 4, 8}


def test_cp_divides_the_sequence() -> None:
    assert cps(pipelines(1, sequences=(6,), switched_off=(CONTEXT,))) == {1, 2}


def test_zero_inside_a_node_is_offered_where_dp_spans_nodes() -> None:
    def shards(**other: Any) -> set[tuple[int, int]]:
        found = pipelines(16, **{"devices_per_node": 4, **other})
        return {(d.pp, d.dp_shard) for d in found.candidates if d.dp_shard}

    assert shards() == {(1, 2), (1, 4)}
    assert shards(devices_per_node=2) == {(1, 2), (2, 2)}
    assert shards(pins={"zero": 0}) == set()
    assert shards(pins={"dp": 8, "dp_shard": 2, "pp": 1}) == {(1, 2)}
