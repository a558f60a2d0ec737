"""Work of ops against counts by hand."""

import pytest

from meshfold.cost_models.op_costs.compute import Work, op_name, op_work
from meshfold.cost_models.op_costs.einsum import dims_of
from meshfold.ir.op_graph import Arg, Op, OpGraph, Ref, Slot, SlotKind, Value

F32 = 4


def work(
    target: str,
    operands: list[Value],
    results: list[Value],
    *extra: Arg,
    kwargs: tuple[tuple[str, Arg], ...] = (),
) -> Work:
    n = len(operands)
    op = Op(
        target,
        (*(Ref(k) for k in range(n)), *extra),
        kwargs,
        tuple(range(n, n + len(results))),
    )
    slots = tuple(Slot(SlotKind.VALUE, str(k)) for k in range(n))
    graph = OpGraph(slots, (*operands, *results), (op,), op.outputs)
    return op_work(graph, op)


def value(*shape: int, grad: bool = True, dtype: str = "float32") -> Value:
    return Value(shape, dtype, grad)


X, W, Y = value(2, 3, 4), value(5, 4), value(2, 3, 5)
X_BYTES, W_BYTES, Y_BYTES = 24 * F32, 20 * F32, 30 * F32


def test_linear_is_one_gemm_forward_and_one_per_gradient() -> None:
    flops = 2 * 6 * 4 * 5
    moved = X_BYTES + W_BYTES + Y_BYTES
    got = work("aten.linear.default", [X, W], [Y])
    # Backward reads the incoming gradient, x and w, and writes the gradients of x and w.
    assert got == Work(flops, moved, 2 * flops, moved + X_BYTES + W_BYTES)
    frozen = work("aten.linear.default", [X, value(5, 4, grad=False)], [Y])
    assert frozen == Work(flops, moved, flops, moved + X_BYTES)
    nothing = work("aten.linear.default", [value(2, 3, 4, grad=False), W], [Y])
    assert nothing.backward_flops == flops


@pytest.mark.parametrize(
    ("target", "operands", "results", "flops"),
    [
        ("aten.mm.default", [value(3, 4), value(4, 5)], [value(3, 5)], 120),
        ("aten.addmm.default", [value(5), value(3, 4), value(4, 5)], [value(3, 5)], 120),
        ("aten.bmm.default", [value(2, 3, 4), value(2, 4, 5)], [value(2, 3, 5)], 240),
        ("aten.matmul.default", [value(2, 3, 4), value(4, 5)], [value(2, 3, 5)], 240),
        (
            "aten.baddbmm.default",
            [value(2, 3, 5), value(2, 3, 4), value(2, 4, 5)],
            [value(2, 3, 5)],
            240,
        ),
        ("aten._grouped_mm.default", [value(6, 4), value(2, 4, 5)], [value(6, 5)], 240),
    ],
)
def test_matrix_products(
    target: str, operands: list[Value], results: list[Value], flops: int
) -> None:
    got = work(target, operands, results)
    assert (got.flops, got.backward_flops) == (flops, 2 * flops)


def test_experts_are_one_gemm_of_all_rows_over_the_weights_of_all_experts() -> None:
    """6 rows of 4, 3 experts of 5 x 4: 2 * 6 * 4 * 5 flops, each gradient as many."""
    x, w, ids, out = value(6, 4), value(3, 5, 4), value(6, grad=False, dtype="int64"), value(6, 5)
    moved = F32 * (24 + 60 + 30) + 8 * 6
    target = "meshfold.expert_linear.default"
    got = work(target, [x, w, ids], [out])
    # Backward reads the gradient of out, x, w and ids, and writes the gradients of x and w.
    assert got == Work(240, moved, 480, moved + F32 * (24 + 60))
    frozen = work(target, [x, value(3, 5, 4, grad=False), ids], [out])
    assert frozen == Work(240, moved, 240, moved + F32 * 24)


def test_products_of_the_same_rows_read_them_once() -> None:
    """6 rows of 4 with weights 5 x 4, trained, and 3 x 4, frozen, which has a bias."""
    x, w, frozen, bias = value(6, 4), value(5, 4), value(3, 4, grad=False), value(3)
    moved = F32 * (24 + 20 + 12 + 3 + 30 + 18)
    got = work(
        "meshfold.all_gather_matmul.default", [x, w, frozen, bias], [value(6, 5), value(6, 3)]
    )
    flops = 2 * 24 * 5 + 2 * 24 * 3
    # Gradients of x by both, and of the first weight.
    back = flops + 2 * 24 * 5
    assert got == Work(flops, moved, back, moved + F32 * (24 + 20 + 3))
    one = work("meshfold.matmul_reduce_scatter.default", [x, w], [value(6, 5)])
    assert (one.flops, one.backward_flops) == (240, 480)


def test_distances_of_all_pairs_of_rows() -> None:
    """6 rows and 5 rows of 4: 30 sums of 4 powers of differences; one gradient is wanted."""
    x, other, out = value(6, 4), value(5, 4, grad=False), value(6, 5)
    moved = F32 * (24 + 20 + 30)
    assert work("aten.cdist.default", [x, other], [out]) == Work(360, moved, 360, moved + F32 * 24)


def test_the_parts_of_a_complex_number_are_a_view() -> None:
    pairs, numbers = value(6, 4, 2), value(6, 4, dtype="complex64")
    assert work("aten.view_as_complex.default", [pairs], [numbers]) == Work(0, 0, 0, 0)
    assert work("aten.view_as_real.default", [numbers], [pairs]) == Work(0, 0, 0, 0)


SDPA = "aten.scaled_dot_product_attention.default"


def test_attention_is_two_gemms_forward_and_five_backward() -> None:
    q, k, v = value(2, 3, 8, 4), value(2, 3, 10, 4), value(2, 3, 10, 6)
    out = value(2, 3, 8, 6)
    flops = 2 * (2 * 3) * 8 * 10 * (4 + 6)
    got = work(SDPA, [q, k, v], [out])
    assert (got.flops, got.backward_flops) == (flops, 2.5 * flops)
    for causal in (
        work(SDPA, [q, k, v], [out], None, 0.0, True),
        work(SDPA, [q, k, v], [out], kwargs=(("is_causal", True),)),
        work("aten._scaled_dot_product_flash_attention.default", [q, k, v], [out], 0.0, True),
    ):
        assert causal.flops == flops / 2
    masked = work(SDPA, [q, k, v, value(8, 10, grad=False)], [out], 0.0, False)
    assert masked.flops == flops
    frozen = [value(*o.shape, grad=False) for o in (q, k, v)]
    assert work(SDPA, frozen, [out]).backward_flops == 0


def test_convolution_counts_its_kernel() -> None:
    image, weight = value(2, 6, 8, 8, grad=False), value(10, 3, 4, 4)
    got = work("aten.convolution.default", [image, weight], [value(2, 10, 2, 2)], None)
    flops = 2 * (2 * 10 * 4) * (3 * 16)
    assert (got.flops, got.backward_flops) == (flops, flops)


def test_transposed_convolution_counts_from_its_input() -> None:
    image, weight = value(1, 6, 4, 4), value(6, 10, 2, 2)
    got = work(
        "aten.convolution.default",
        [image, weight],
        [value(1, 10, 8, 8)],
        None,
        (2, 2),
        (0, 0),
        (1, 1),
        True,
    )
    assert got.flops == 2 * (6 * 16) * (10 * 4)


def test_convolution_by_hand() -> None:
    """3 x 3, stride 2 on 8 x 8: every one of 2 * 10 * 4 * 4 results is a dot product of 6 * 9."""
    image, weight, bias = value(2, 6, 8, 8), value(10, 6, 3, 3), value(10)
    out = value(2, 10, 4, 4)
    flops = 2 * (2 * 10 * 16) * 54
    moved = F32 * (768 + 540 + 10 + 320)
    got = work("aten.conv2d.default", [image, weight, bias], [out], (2, 2), (1, 1))
    assert got == Work(flops, moved, 2 * flops, moved + F32 * (768 + 540 + 10))
    first = work("aten.conv2d.padding", [value(2, 6, 8, 8, grad=False), weight], [out])
    assert (first.flops, first.backward_flops) == (flops, flops)


def test_groups_divide_the_dot_product_of_a_convolution() -> None:
    depthwise = work("aten.conv1d.default", [value(2, 6, 8), value(6, 1, 3)], [value(2, 6, 6)])
    assert depthwise.flops == 2 * (2 * 6 * 6) * 3
    two = work("aten.conv1d.default", [value(2, 6, 8), value(4, 3, 3)], [value(2, 4, 6)])
    assert two.flops == 2 * (2 * 4 * 6) * 9


def test_transposed_convolution_op_counts_from_its_input() -> None:
    operands = [value(1, 6, 4, 4), value(6, 10, 2, 2)]
    got = work("aten.conv_transpose2d.input", operands, [value(1, 10, 8, 8)], None, (2, 2))
    assert (got.flops, got.backward_flops) == (2 * 96 * 40, 4 * 96 * 40)


X4 = value(2, 6, 4, 4)
X4_BYTES, CHANNELS_BYTES = 192 * F32, 6 * F32


def test_batch_norm_in_training_reads_the_batch_twice() -> None:
    channels, running = value(6), value(6, grad=False)
    got = work(
        "aten._native_batch_norm_legit_functional.default",
        [X4, channels, channels, running, running],
        [X4, *[running] * 4],
    )
    # Twice x and its result's gradient, once the gradient of x; vectors of channels beside that.
    assert got.num_bytes == 3 * X4_BYTES + 8 * CHANNELS_BYTES
    assert got.backward_bytes == 5 * X4_BYTES + (4 + 4 + 2) * CHANNELS_BYTES
    assert got.flops == 0


def test_batch_norm_in_eval_mode_is_elementwise() -> None:
    channels, running = value(6), value(6, grad=False)
    got = work(
        "aten._native_batch_norm_legit_no_training.default",
        [X4, channels, channels, running, running],
        [X4, value(0, grad=False), value(0, grad=False)],
    )
    assert got.num_bytes == 2 * X4_BYTES + 4 * CHANNELS_BYTES
    assert got.backward_bytes == 3 * X4_BYTES + 6 * CHANNELS_BYTES


def test_pooling() -> None:
    half = value(2, 6, 2, 2)
    half_bytes, places_bytes = X4_BYTES // 4, 48 * 8
    maximum = work("aten.max_pool2d.default", [X4], [half], (2, 2))
    moved = X4_BYTES + half_bytes + places_bytes
    assert maximum == Work(0, moved, 0, moved)
    frozen = work("aten.max_pool2d.default", [value(2, 6, 4, 4, grad=False)], [half], (2, 2))
    assert frozen.backward_bytes == 0
    mean = work("aten.avg_pool2d.default", [X4], [half], (2, 2))
    assert mean == Work(0, X4_BYTES + half_bytes, 0, X4_BYTES + half_bytes)
    one = work("aten.adaptive_avg_pool2d.default", [X4], [value(2, 6, 1, 1)], (1, 1))
    assert one.num_bytes == X4_BYTES + 12 * F32


@pytest.mark.parametrize(
    ("target", "result", "backward_bytes"),
    [
        ("aten.view.default", value(6, 4), 0),
        ("aten.permute.default", value(4, 2, 3), 0),
        ("aten.slice.Tensor", value(1, 3, 4), X_BYTES + X_BYTES // 2),
        ("aten.select.int", value(3, 4), X_BYTES + X_BYTES // 2),
        ("aten.expand.default", value(5, 2, 3, 4), 6 * X_BYTES),
        ("aten.expand.default", value(2, 3, 4), 0),
    ],
)
def test_views_are_free_forward(target: str, result: Value, backward_bytes: int) -> None:
    assert work(target, [X], [result]) == Work(0, 0, 0, backward_bytes)
    constant = value(2, 3, 4, grad=False)
    assert work(target, [constant], [result]) == Work(0, 0, 0, 0)


def test_split_fills_the_whole_gradient() -> None:
    parts = [value(2, 3, 2), value(2, 3, 2)]
    assert work("aten.split.Tensor", [X], parts, 2, -1) == Work(0, 0, 0, 2 * X_BYTES)


def test_embedding_reads_its_rows_and_has_a_dense_gradient() -> None:
    table, tokens = value(100, 4), value(2, 3, grad=False, dtype="int64")
    moved = 2 * X_BYTES + 6 * 8
    expected = Work(0, moved, 0, 400 * F32 + moved)
    assert work("aten.embedding.default", [table, tokens], [X]) == expected


def test_bags_read_every_row_once() -> None:
    table, ids = value(100, 4), value(2, 3, grad=False, dtype="int64")
    rows, out = 6 * 4 * F32, 2 * 4 * F32
    expected = Work(0, rows + 48 + out, 0, 400 * F32 + rows + out + 48)
    assert work("meshfold.embedding_bag.default", [table, ids], [value(2, 4)]) == expected


def test_cross_entropy_touches_the_logits_four_times() -> None:
    logits, labels = value(6, 100), value(6, grad=False, dtype="int64")
    got = work("aten.cross_entropy_loss.default", [logits, labels], [value()])
    assert got == Work(0, 2 * 600 * F32, 0, 2 * 600 * F32)


def test_narrow_logits_are_widened_and_passed_over() -> None:
    labels = value(6, grad=False, dtype="int64")
    logits = value(6, 100, dtype="bfloat16")
    # Forward 2 + 4 for the cast and six passes of 4; backward twice the cast, and six passes.
    expected = Work(0, 600 * (6 + 24), 0, 600 * (12 + 24))
    assert work("meshfold.cross_entropy.default", [logits, labels], [value()]) == expected
    wide = work("meshfold.cross_entropy.default", [value(6, 100), labels], [value()])
    assert wide == Work(0, 600 * 24, 0, 600 * 24)


def test_a_gated_product_is_computed_again() -> None:
    # silu 2, product 3; backward product 3 and slope 3 for the gate, silu 2 and product 3 for x.
    got = work("meshfold.gated_product.default", [X, X], [X], "silu")
    assert got == Work(0, 5 * X_BYTES, 0, 11 * X_BYTES)
    constant = value(2, 3, 4, grad=False)
    got = work("meshfold.gated_product.default", [X, constant], [X], "silu")
    assert got == Work(0, 5 * X_BYTES, 0, 6 * X_BYTES)


def test_a_loss_that_makes_its_logits_multiplies_once_more() -> None:
    x, matrix, labels = value(6, 8), value(10, 8), value(6, grad=False, dtype="int64")
    got = work("meshfold.linear_cross_entropy.default", [x, matrix, labels], [value()])
    flops, logits = 2 * 6 * 8 * 10, 4 * 6 * 10
    assert (got.flops, got.backward_flops) == (flops, 3 * flops)
    # Operands and the loss; logits are written, then passed over six times.
    assert got.num_bytes == 4 * (6 * 8 + 10 * 8) + 8 * 6 + 4 + 7 * logits
    # Operands, their gradients and that of the loss; logits again, and one pass for each gradient.
    assert got.backward_bytes == 2 * 4 * (6 * 8 + 10 * 8) + 8 * 6 + 4 + 9 * logits
    assert got.inner_bytes == (7 * logits, 9 * logits)
    frozen = value(10, 8, grad=False)
    got = work("meshfold.linear_cross_entropy.default", [x, frozen, labels], [value()])
    assert got.backward_flops == 2 * flops


def test_everything_else_is_memory_traffic() -> None:
    got = work("aten.mul.Tensor", [X, X], [X])
    assert got == Work(0, 3 * X_BYTES, 0, 5 * X_BYTES)
    made = work("aten.arange.default", [], [value(8, grad=False, dtype="int64")], 8)
    assert made == Work(0, 64, 0, 0)


def test_an_op_in_no_table_is_memory_traffic() -> None:
    for target in ("aten.fft_rfft.default", "mylib.linear.default", "aten.add_.Tensor"):
        assert work(target, [X, W], [Y]).flops == 0


def test_names() -> None:
    assert op_name("aten.linear.default") == "linear"
    assert op_name("linear") == "linear"


def test_an_einsum_counts_all_its_letters() -> None:
    graph = OpGraph(
        (Slot(SlotKind.VALUE), Slot(SlotKind.VALUE)),
        (X, W, Y),
        (Op("aten.einsum.default", ("bsk,ok->bso", (Ref(0), Ref(1))), (), (2,)),),
        (2,),
    )
    assert op_work(graph, graph.ops[0]) == work("aten.linear.default", [X, W], [Y])
    dots = Op("aten.einsum.default", ("...k,ok->...o", (Ref(0), Ref(1))), (), (2,))
    assert op_work(graph, dots) == op_work(graph, graph.ops[0])


@pytest.mark.parametrize(
    ("equation", "shapes", "expected"),
    [
        ("...qd,...kd->...qk", [(2, 3, 4), (3, 4)], ["e0 q d", "k d", "e0 q k"]),
        ("...a,a...", [(2, 3, 4), (4, 3)], ["e0 e1 a", "a e1", "e0 e1"]),
        ("ba,cb", [(2, 3), (4, 2)], ["b a", "c b", "a c"]),
        ("...a->a", [(2, 3)], ["e0 a", "a"]),
        ("bii->b", [(2, 3, 3)], ["b i i", "b"]),
    ],
)
def test_letters_of_an_einsum(
    equation: str, shapes: list[tuple[int, ...]], expected: list[str]
) -> None:
    assert dims_of(equation, shapes) == tuple(tuple(term.split()) for term in expected)
