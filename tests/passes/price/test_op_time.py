"""Time of one op under a rule: kernels divided, collectives inside priced forward and backward."""

import pytest
from support.graphs.op_graphs import costs_on, mlp
from support.graphs.ops import SingleOp
from support.graphs.tensors import real

from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.ir.op_graph import Op, OpGraph, Ref, Slot, SlotKind, Value
from meshfold.passes.graph.without_dropout import ATTENTION
from meshfold.passes.price.op_time import OpTime, OpTimers, OpWorks, op_time
from meshfold.passes.rules.ops.collective_matmul import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER
from meshfold.passes.rules.ops.experts import EXPERT_LOAD
from meshfold.passes.rules.table import refined_rules, region_rules


def test_work_is_divided_by_the_axes_that_split_it() -> None:
    graph = mlp(batch=4096, width=4096, hidden=4096)
    mesh, costs, _ = costs_on(1, 2)
    by_name = {rule.name: rule for rule in region_rules(graph, (2,))[0][0]}
    whole = op_time(graph, graph.ops[0], (by_name["I"],), costs)
    split = op_time(graph, graph.ops[0], (by_name["o"],), costs)
    # Columns of the weight and of the result are halved, rows of x are not.
    flops, matrix = 2 * 4096**3, 4 * 4096**2
    assert whole.forward_s == pytest.approx(costs.compute_s(flops, 3 * matrix, "float32"))
    assert split.forward_s == pytest.approx(costs.compute_s(flops / 2, 2 * matrix, "float32"))
    assert split.backward_s < whole.backward_s


def test_synchronised_statistics_are_priced_forward_and_backward() -> None:
    """Two sums of one number a channel forward, one of two backward; none where channels split."""
    graph = SingleOp(
        "aten._native_batch_norm_legit.no_stats", real(8, 6), real(6), real(6), True, 0.1, 1e-5
    ).graph
    mesh, costs, _ = costs_on(1, 2)
    by_name = {rule.name: rule for rule in region_rules(graph, (2,))[0][0]}
    batch = op_time(graph, graph.ops[0], (by_name["d0"],), costs)
    channels_bytes = 6 * 8
    one_s = costs.collective_s("all_reduce", channels_bytes, (0,))
    assert batch.communication_s == pytest.approx((2 * one_s,))
    both_s = costs.collective_s("all_reduce", 2 * channels_bytes, (0,))
    assert batch.backward_communication_s == pytest.approx((both_s,))
    inside_s = 2 * one_s + both_s
    assert batch.total_s == pytest.approx(batch.forward_s + batch.backward_s + inside_s)
    channels = op_time(graph, graph.ops[0], (by_name["c"],), costs)
    assert channels.communication_s == channels.backward_communication_s == (0.0,)


def test_experts_on_ranks_are_as_slow_as_the_busiest_rank() -> None:
    """Rows are unsharded, weights are halved; the busiest rank has EXPERT_LOAD of the mean."""
    rows, width = 4096, 4096
    x, w = Value((rows, width), "float32", True), Value((2, width, width), "float32", True)
    ids = Value((rows,), "int64")
    op = Op("meshfold.expert_linear.default", (Ref(0), Ref(1), Ref(2), None, False), (), (3,))
    graph = OpGraph((Slot(SlotKind.VALUE),) * 3, (x, w, ids, x), (op,), (3,))
    mesh, costs, _ = costs_on(1, 2)
    by_name = {rule.name: rule for rule in region_rules(graph, (2,))[0][0]}
    split = op_time(graph, op, (by_name["e"],), costs)
    flops = 2 * rows * width * width * EXPERT_LOAD / 2
    moved = 2 * x.num_bytes + w.num_bytes / 2 + ids.num_bytes
    assert split.forward_s == pytest.approx(costs.compute_s(flops, moved, "float32"))
    assert by_name["e"].load == EXPERT_LOAD > by_name["o"].load == 1.0


def ring_time(rows: int, cp: int, tp: int, *, causal: bool = False) -> tuple[OpTime, CostModel]:
    """Of attention over `rows` with 8 heads of 64 in bfloat16, heads sharded by tp."""
    shape = (1, 8, rows, 64)
    x = Value(shape, "bfloat16", True)
    op = Op(ATTENTION, (Ref(0), Ref(1), Ref(2), None, 0.0, causal), (), (3,))
    graph = OpGraph((Slot(SlotKind.VALUE),) * 3, (x, x, x, x), (op,), (3,))
    mesh, costs, _ = costs_on(cp, tp)
    rules = {r.name: r for r in region_rules(graph, (cp,))[0][0]}
    (ring,) = refined_rules(graph, 0, rules["s"], cp)
    heads = {r.name: r for r in region_rules(graph, (tp,))[0][0]}["h"]
    return op_time(graph, op, (ring, heads), costs), costs


def test_keys_that_go_round_hide_behind_long_visits_and_cost_what_is_left() -> None:
    for rows, hides in ((2**17, True), (2**10, False)):
        found, costs = ring_time(rows, 4, 2)
        own = rows * 8 * 64 // 8  # numbers of a rank
        p, g, pg = (costs.collective_s("shift", n * own, (0,)) for n in (4, 8, 12))
        merge_s = costs.compute_s(0, 3 * 4 * own, "bfloat16")
        add_s = costs.compute_s(0, 3 * 3 * 4 * own, "bfloat16")
        b, back_b = found.forward_s / 4 + merge_s, found.backward_s / 4 + add_s
        assert (b > p and back_b > pg) == hides
        forward_s, backward_s = found.communication_s[0], found.backward_communication_s[0]
        assert forward_s + found.forward_s == pytest.approx(3 * max(b, p) + b)
        total_s = 3 * max(back_b, pg) + max(back_b, g) + g
        assert backward_s + found.backward_s == pytest.approx(total_s)
        assert found.communication_s[1] == 0.0


def test_a_causal_ring_is_as_slow_as_the_last_rank() -> None:
    causal, full = (ring_time(2**16, 4, 2, causal=c)[0] for c in (True, False))
    assert causal.forward_s == pytest.approx(full.forward_s)
    assert causal.backward_s == pytest.approx(full.backward_s)


def ring_products_time(
    target: str, rows: int, n: int
) -> tuple[OpTime, CostModel, tuple[float, float, float]]:
    """Of rows of 64 with weights [64, 64] in bfloat16, over n ranks; and c, p and d of the module
    docstring, forward."""
    x, w = Value((rows, 64), "bfloat16", True), Value((64, 64), "bfloat16", True)
    gathers = target == ALL_GATHER_MATMUL
    weights, bias = ((Ref(1),), (None,)) if gathers else (Ref(1), None)
    op = Op(target, (Ref(0), weights, bias, 0, (1, 1), False, n), (), (2,))
    graph = OpGraph((Slot(SlotKind.VALUE),) * 2, (x, w, x), (op,), (2,))
    mesh, costs, _ = costs_on(n, 1)
    ring = {r.name: r for r in region_rules(graph, (n,))[0][0]}["ring"]
    found = op_time(graph, op, (ring,), costs)
    row_bytes = rows * 64 * 2 // n
    adding_s, putting_s = (costs.compute_s(0, n * row_bytes, "bfloat16") for n in (3, 2))
    pass_s = costs.collective_s("shift", row_bytes, (0,))
    return found, costs, (pass_s, adding_s, putting_s, row_bytes)


@pytest.mark.parametrize("rows", [2**14, 2**22])
def test_rows_of_a_ring_hide_behind_products(rows: int) -> None:
    found, costs, (p, adding_s, putting_s, row_bytes) = ring_products_time(
        ALL_GATHER_MATMUL, rows, 4
    )
    slowdown = costs.cluster.overlap_slowdown
    assert slowdown > 1

    def beside(a: float, b: float) -> float:
        return max(a, b) + (slowdown - 1) * min(a, b)

    # Forward: what is made is whole, a quarter of the weight is here.
    flops, moved = 2 * rows * 64 * 64 / 4, row_bytes + 64 * 64 * 2 / 4 + row_bytes
    assert found.forward_s == pytest.approx(costs.compute_s(flops, moved, "bfloat16"))
    c = found.forward_s / 4 + putting_s
    forward_s = found.communication_s[0] + found.forward_s
    assert forward_s == pytest.approx(3 * beside(c, p) + c)
    d = found.backward_s / 2
    c = d / 4 + adding_s
    backward_s = found.backward_communication_s[0] + found.backward_s
    assert backward_s == pytest.approx(c + 2 * beside(c, p) + beside(c + d, p))


@pytest.mark.parametrize("rows", [2**14, 2**22])
def test_sums_that_go_round_hide_behind_products(rows: int) -> None:
    found, costs, (p, adding_s, putting_s, _) = ring_products_time(MATMUL_REDUCE_SCATTER, rows, 4)
    slowdown = costs.cluster.overlap_slowdown

    def beside(a: float, b: float) -> float:
        return max(a, b) + (slowdown - 1) * min(a, b)

    c = found.forward_s / 4 + adding_s
    forward_s = found.communication_s[0] + found.forward_s
    assert forward_s == pytest.approx(c + 3 * beside(c, p))
    d = found.backward_s / 2
    c = d / 4 + putting_s
    backward_s = found.backward_communication_s[0] + found.backward_s
    assert backward_s == pytest.approx(3 * beside(c, p) + c + d)


def test_timers_are_made_once_and_works_serve_all_meshes() -> None:
    graph, works = mlp(batch=64, width=32, hidden=128), OpWorks()
    assert works.of(graph) is works.of(graph)
    for n in (2, 4):
        mesh, costs, _ = costs_on(1, n)
        timers = OpTimers(costs, works)
        assert timers.of(graph) is timers.of(graph)
        for op, timer, per_axis in zip(
            graph.ops, timers.of(graph), region_rules(graph, (n,)), strict=True
        ):
            for rule in per_axis[0]:
                assert timer.time((rule,)) == op_time(graph, op, (rule,), costs)
