"""The decision tree: its strategies, the named cuts and what pins do to it."""

from typing import get_args

import pytest

from meshfold.errors import OptionError
from meshfold.ir.strategy import SELECTIVE, Degrees, Recompute, UniformStrategy
from meshfold.passes.one_pass.pruning import divisors
from meshfold.passes.one_pass.tree import (
    ALL_ON_DISK,
    BATCH,
    CONTEXT,
    EXPERTS,
    GRADIENTS,
    IN_MEMORY,
    MIXED,
    NO_HOST_LINK,
    NO_HOST_MEMORY,
    NO_STATES,
    NODE,
    NOTHING_SAVED,
    PINNED,
    RESTRICTIONS,
    SAVED_EAGER,
    SAVED_ONCE,
    UNASKED_OFFLOAD,
    SearchSpec,
    Tree,
    grow_tree,
)


def tree(num_devices: int, batch_size: int = 8, per_node: int = 8, **spec) -> Tree:
    return grow_tree(
        SearchSpec(
            num_devices=num_devices,
            devices_per_node=per_node,
            batch_size=batch_size,
            pins=spec.pop("pins", {}),
            **spec,
        ),
    )


def test_four_devices() -> None:
    plain = [strategy.label for strategy in tree(4).strategies if strategy.recompute == "none"]
    assert plain == [
        "dp4",
        "dp4, zero2",
        "dp4, zero3",
        "dp2 x tp2",
        "dp2 x tp2, zero2",
        "dp2 x tp2, zero3",
        "dp2 x tp2+sp",
        "dp2 x tp2+sp, zero2",
        "dp2 x tp2+sp, zero3",
        "dp2 x tp2 as dp",
        "dp2 x tp2 as dp, zero2",
        "dp2 x tp2 as dp, zero3",
        "tp4",
        "tp4+sp",
        "tp4 as dp",
        "tp4 as dp, zero2",
        "tp4 as dp, zero3",
    ]
    assert len(tree(4).strategies) == 5 * len(plain)
    assert "dp4, zero3, recompute full" in {strategy.label for strategy in tree(4).strategies}


def test_where_feature_maps_pass_tp_may_take_the_batch() -> None:
    """Such a strategy shards no weight on tp; another region may, so tp may leave the node."""
    found = tree(4, per_node=2, has_feature_maps=True)
    assert NODE not in found.pruned
    batch = [
        strategy
        for strategy in found.strategies
        if strategy.tp_mode == "data" and strategy.recompute == "none"
    ]
    assert [strategy.label for strategy in batch] == [
        "dp2 x tp2 as dp",
        "dp2 x tp2 as dp, zero2",
        "dp2 x tp2 as dp, zero3",
        "tp4 as dp",
        "tp4 as dp, zero2",
        "tp4 as dp, zero3",
    ]
    without = tree(4, per_node=4)
    rest = [s for s in found.strategies if not s.dp_shard]
    assert rest == list(without.strategies)


def test_who_pins_degrees_has_them_in_all_layers() -> None:
    """A restriction that plans name. Feature maps are sharded on tp in no other way."""
    for pins in ({"tp": 2}, {"dp": 2}):
        found = tree(4, pins=pins)
        assert not any(s.batch_on_tp for s in found.strategies) and found.pruned[MIXED] > 0
        assert found.num_strategies == len(found.strategies) + sum(found.pruned.values())
        for spec in ({"switched_off": (MIXED,)}, {"has_feature_maps": True}):
            assert any(s.batch_on_tp for s in tree(4, pins=pins, **spec).strategies)
    assert MIXED in RESTRICTIONS and MIXED not in tree(4, pins={"zero": 3}).pruned


def test_tp_is_dp_where_the_batch_divides_over_both() -> None:
    found = tree(4, batch_size=2).strategies
    assert {(s.dp, s.tp) for s in found if s.batch_on_tp} == set()
    maps = tree(4, batch_size=2, has_feature_maps=True).strategies
    assert {(s.dp, s.tp) for s in maps if s.batch_on_tp} == {(2, 2), (1, 4)}


def test_one_device_keeps_or_recomputes() -> None:
    assert tree(1).strategies == tuple(
        UniformStrategy(recompute=word) for word in get_args(Recompute)
    )


def test_degrees_that_are_no_powers_of_two() -> None:
    assert {(strategy.dp, strategy.tp) for strategy in tree(6, 6).strategies} == {
        (6, 1),
        (3, 2),
        (2, 3),
        (1, 6),
    }


@pytest.mark.parametrize("allow_offload", [False, True])
def test_every_strategy_candidate_is_counted_once(allow_offload: bool) -> None:
    found = tree(16, 12, per_node=4, allow_offload=allow_offload, pins={"sp": 0})
    assert found.num_strategies == len(found.strategies) + sum(found.pruned.values())
    assert (UNASKED_OFFLOAD in found.pruned) != allow_offload
    assert {BATCH, NODE, PINNED} <= found.pruned.keys()


def test_offload_comes_on_request() -> None:
    spec = {"host_bytes_per_s": 1e9, "host_memory_bytes_per_s": 1e9}
    assert {strategy.offload for strategy in tree(2, **spec).strategies} == {"none"}
    found = tree(2, allow_offload=True, **spec).strategies
    everything = {"none", "optimizer", "parameters", "activations"}
    assert {strategy.offload for strategy in found} == everything
    assert not any(x.offload == "parameters" and x.zero in (1, 2) for x in found)
    # States are on disk where the host's memory is too small, or a pin says so.
    of_disk = {**spec, "disk_bytes_per_s": 1e9}
    small = tree(2, allow_offload=True, states_on_disk=True, **of_disk)
    assert {strategy.offload for strategy in small.strategies} == {"none", "disk", "activations"}
    assert small.pruned[ALL_ON_DISK] == 2 * 5 * (4 + 2 + 4)
    pinned = tree(2, pins={"offload": "disk"}, **of_disk).strategies
    assert {strategy.offload for strategy in pinned} == {"disk"}
    assert tree(2, allow_offload=True, **of_disk).strategies == found


def test_zero_1_in_one_pass_is_zero_2() -> None:
    """Gradients are reduce-scattered as they come; it is offered where somebody pins it."""
    assert {strategy.zero for strategy in tree(2).strategies} == {0, 2, 3}
    # Three ways to recompute, on dp2 and on tp2 as dp.
    assert tree(2).pruned[GRADIENTS] == 2 * 5
    assert {strategy.zero for strategy in tree(2, switched_off=(GRADIENTS,)).strategies} == {
        0,
        1,
        2,
        3,
    }
    assert {strategy.zero for strategy in tree(2, pins={"zero": 1}).strategies} == {1}


def test_offload_needs_a_link_to_the_host_and_states() -> None:
    offloads = {strategy.offload for strategy in tree(2, allow_offload=True).strategies}
    assert offloads == {"none"}
    hosts = {"host_bytes_per_s": 1e9, "host_memory_bytes_per_s": 1e9}
    known = tree(2, allow_offload=True, **hosts)
    assert {strategy.offload for strategy in known.strategies} == {
        "none",
        "optimizer",
        "parameters",
        "activations",
    }
    linked = tree(2, allow_offload=True, host_bytes_per_s=1e9)
    assert {strategy.offload for strategy in linked.strategies} == {"none", "activations"}
    assert linked.pruned[NO_HOST_MEMORY] == 3 * 5 * (4 + 2 + 4)
    stateless = tree(2, allow_offload=True, **hosts, has_states=False)
    assert {strategy.offload for strategy in stateless.strategies} == {"none", "activations"}
    assert NO_HOST_LINK not in known.pruned and stateless.pruned[NO_STATES] > 0
    # Four ways to offload, three to recompute; four ZeRO levels on dp2 and on tp2 as dp, one on
    # tp2, with and without sp.
    assert tree(2, allow_offload=True).pruned[NO_HOST_LINK] == 4 * 5 * (4 + 2 + 4)


def test_states_go_to_the_host_only_where_somebody_asks() -> None:
    hosts = {"host_bytes_per_s": 1e9, "host_memory_bytes_per_s": 1e9}
    unasked = tree(1, **hosts)
    assert {strategy.offload for strategy in unasked.strategies} == {"none"}
    # Whatever else it does, four things to offload: without recomputation, with some or all of it.
    assert unasked.pruned[UNASKED_OFFLOAD] == 5 * 4
    assert unasked.strategies == tree(1).strategies
    pinned = tree(1, **hosts, pins={"offload": "optimizer"})
    assert {strategy.offload for strategy in pinned.strategies} == {"optimizer"}


def test_activations_of_recomputed_layers_stay() -> None:
    """Of full recomputation there are none; selective recomputation keeps some, which is a
    restriction that plans name."""
    spec = {"allow_offload": True, "host_bytes_per_s": 1e9, "host_memory_bytes_per_s": 1e9}
    found = tree(1, **spec)
    assert found.pruned == {IN_MEMORY: 5, NOTHING_SAVED: 1, SAVED_ONCE: 3}
    assert len(found.strategies) == 16
    assert SAVED_ONCE in RESTRICTIONS and NOTHING_SAVED not in RESTRICTIONS
    pinned = tree(1, pins={"offload": "activations"}, **spec)
    assert [strategy.recompute for strategy in pinned.strategies] == ["none"]


def test_activations_stay_in_mode_scheduled() -> None:
    spec = {"allow_offload": True, "host_bytes_per_s": 1e9, "host_memory_bytes_per_s": 1e9}
    found = tree(1, mode="scheduled", **spec)
    assert found.pruned == {IN_MEMORY: 5, SAVED_EAGER: 5} and SAVED_EAGER in RESTRICTIONS


@pytest.mark.parametrize(
    ("pins", "spec", "message"),
    [
        *(
            (
                {"offload": "activations", **pins},
                {"host_bytes_per_s": 1e9, "mode": mode},
                f"pin offload=activations.*: {why}",
            )
            for pins, mode, why in (
                ({}, "scheduled", "activations go to the host in mode eager alone; leave --mode"),
                ({"recompute": "full"}, "eager", "full recomputation keeps nothing to offload; l"),
                *(
                    ({"recompute": word}, "eager", "selective recomputation keeps activations")
                    for word in SELECTIVE
                ),
            )
        ),
        (
            {"offload": "optimizer"},
            {},
            "pin offload=optimizer: nothing is known about the link between device and host; give",
        ),
        (
            {"offload": "optimizer"},
            {"host_bytes_per_s": 1e9},
            "pin offload=optimizer: nothing is known about the host's memory, in which the",
        ),
        (
            {"offload": "activations"},
            {"allow_offload": True},
            "pin offload=activations: nothing is known about the link between device and host",
        ),
        (
            {"offload": "optimizer"},
            {
                "allow_offload": True,
                "host_bytes_per_s": 1e9,
                "host_memory_bytes_per_s": 1e9,
                "has_states": False,
            },
            "pin offload=optimizer: this optimizer has no states to offload",
        ),
    ],
)
def test_pins_of_offload_that_cannot_be_kept_name_themselves(pins, spec, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        tree(2, pins=pins, **spec)


def test_batch_that_does_not_divide_is_pruned() -> None:
    found = tree(4, batch_size=6)
    assert {strategy.dp for strategy in found.strategies} == {1, 2}
    # dp4, dp2 x tp2 as dp and tp4 as dp: four ZeRO levels, three ways to recompute and five to
    # offload.
    assert found.pruned[BATCH] == 3 * 4 * 5 * 5


def test_tp_stays_inside_a_node_while_it_can() -> None:
    assert max(strategy.tp for strategy in tree(8, per_node=2).strategies) == 2
    assert (
        max(strategy.tp for strategy in tree(8, per_node=2, switched_off=(NODE,)).strategies) == 8
    )
    # A batch of 2 strategies nothing inside the node: the rule has nothing to prefer.
    only = tree(8, batch_size=2, per_node=2)
    assert {strategy.tp for strategy in only.strategies} == {4, 8} and NODE not in only.pruned


def test_pins() -> None:
    found = tree(4, pins={"tp": 2, "sp": 1, "recompute": "none"})
    assert [strategy.label for strategy in found.strategies] == [
        "dp2 x tp2+sp",
        "dp2 x tp2+sp, zero2",
        "dp2 x tp2+sp, zero3",
    ]


@pytest.mark.parametrize(
    ("pins", "batch_size", "message"),
    [
        ({"dp": 3}, 8, "pin dp=3 cannot be kept on 4 devices; dp can be 4, 2, 1|1, 2, 4"),
        ({"tp": 8}, 8, "pin tp=8 cannot be kept on 4 devices; tp can be 1, 2, 4"),
        (
            {"tp": 4, "zero": 3},
            8,
            "pin zero=3 cannot be kept .* with the other pins; zero can be 0",
        ),
        ({"dp": 4, "sp": 1}, 8, "pin sp=1 cannot be kept .* with the other pins; sp can be 0"),
        ({"dp": 4}, 6, "a batch of 6 does not divide over dp=4"),
        ({"zero": 3}, 3, "a batch of 3 does not divide over dp=2, dp=4"),
    ],
)
def test_pins_that_cannot_be_kept_name_themselves(pins, batch_size: int, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        tree(4, batch_size, pins=pins)


def test_cp_is_offered_where_the_batch_is_sharded_and_a_sequence_divides() -> None:
    found = tree(8, batch_size=2, sequences=(96,))
    assert {strategy.degrees for strategy in found.strategies if strategy.cp > 1} == {
        Degrees(2, 2, 2),
        Degrees(2, 4, 1),
    }
    assert found.pruned[CONTEXT] > 0
    assert found.num_strategies == len(found.strategies) + sum(found.pruned.values())
    assert {strategy.cp for strategy in tree(8, batch_size=8, sequences=(96,)).strategies} == {1}
    assert {strategy.cp for strategy in tree(8, batch_size=2, sequences=(9,)).strategies} == {1}
    assert {strategy.cp for strategy in tree(8, batch_size=2).strategies} == {1}


def test_a_degree_that_shares_no_factor_with_the_batch_is_offered() -> None:
    odd = tree(6, batch_size=3, sequences=(96,))
    assert {strategy.degrees for strategy in odd.strategies if strategy.cp > 1} == {
        Degrees(3, 2, 1),
        Degrees(1, 2, 3),
    }
    # What 2 of cp could do, 2 of dp do.
    assert {strategy.cp for strategy in tree(6, batch_size=6, sequences=(96,)).strategies} == {1}


def test_a_pinned_cp_is_kept_and_its_pruning_rule_can_be_switched_off() -> None:
    pinned = tree(8, batch_size=8, sequences=(96,), pins={"cp": 2})
    assert {strategy.cp for strategy in pinned.strategies} == {2} and CONTEXT not in pinned.pruned
    off = tree(8, batch_size=8, sequences=(96,), switched_off=(CONTEXT,))
    assert {strategy.cp for strategy in off.strategies} == {
        1,
        2,
        4,
        8,
    } and CONTEXT not in off.pruned
    with pytest.raises(OptionError, match="pin cp=2 cannot be kept on 8 devices; cp can be 1"):
        tree(8, batch_size=8, pins={"cp": 2})


def test_ep_is_offered_where_it_divides_every_number_of_experts() -> None:
    found = tree(8, batch_size=8, experts=(4, 6))
    assert {strategy.degrees for strategy in found.strategies if strategy.ep > 1} == {
        Degrees(4, ep=2),
        Degrees(2, tp=2, ep=2),
        Degrees(1, tp=4, ep=2),
    }
    assert found.pruned[EXPERTS] > 0
    assert found.num_strategies == len(found.strategies) + sum(found.pruned.values())
    dense = tree(8, batch_size=8)
    assert {strategy.ep for strategy in dense.strategies} == {1} and dense.pruned[
        EXPERTS
    ] > found.pruned[EXPERTS]


def test_a_batch_is_sharded_by_dp_and_ep_together() -> None:
    found = tree(8, batch_size=2, experts=(8,))
    assert {strategy.degrees for strategy in found.strategies if strategy.ep > 1} == {
        Degrees(1, tp=4, ep=2)
    }
    with pytest.raises(OptionError, match="a batch of 2 does not divide over dp=2 x ep=4"):
        tree(8, batch_size=2, experts=(8,), pins={"dp": 2, "ep": 4})


def test_ep_without_experts_is_refused_and_its_pruning_rule_can_be_switched_off() -> None:
    with pytest.raises(OptionError, match="pin ep=2 cannot be kept on 8 devices; ep can be 1"):
        tree(8, batch_size=8, pins={"ep": 2})
    off = tree(8, batch_size=8, switched_off=(EXPERTS,))
    assert {strategy.ep for strategy in off.strategies} == {
        1,
        2,
        4,
        8,
    } and EXPERTS not in off.pruned


def test_divisors() -> None:
    for number in (1, 2, 12, 97, 16384):
        assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]
