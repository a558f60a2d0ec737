"""What autograd keeps of each op, per family, and what gradients cost."""

from dataclasses import replace

import pytest
import torch
from support.graphs.samples import SAMPLES
from support.programs.memory import CountingProber

import meshfold.memory_probe.prober
from meshfold.cost_models.memory.op_memory import (
    NEW_STORAGE,
    NO_GRADIENT,
    OpProbe,
    ProbedOutput,
    ProbeKey,
    TensorSpec,
    dense_spec,
)
from meshfold.errors import UnsupportedOpError
from meshfold.ir.op_graph import Arg, Ref, Symbol
from meshfold.memory_probe.prober import OpProber, StorageCounter
from meshfold.passes.rules.ops.recurrence import RECURRENCES

PROBER = OpProber()


def f32(*shape: int, grad: bool = True) -> TensorSpec:
    return dense_spec(shape, "float32", grad)


def i64(*shape: int) -> TensorSpec:
    return dense_spec(shape, "int64", False)


def probe(target: str, operands: list[TensorSpec], *rest: Arg) -> OpProbe:
    refs = tuple(Ref(k) for k in range(len(operands)))
    return PROBER(ProbeKey(target, (*refs, *rest), (), tuple(operands)))


X, W, B = f32(2, 3, 8), f32(16, 8), f32(16)
ROW = 2 * 3 * 4  # bytes of one float per row of x
X_BYTES = 8 * ROW


@pytest.mark.parametrize(
    ("target", "operands", "rest", "operands_kept", "outputs_kept", "bytes_kept"),
    [
        ("aten.linear.default", [X, W, B], (), (0, 1), (), 0),
        ("aten.linear.default", [X, f32(16, 8, grad=False)], (), (1,), (), 0),
        ("aten.linear.default", [f32(2, 3, 8, grad=False), W], (), (0,), (), 0),
        ("aten.bmm.default", [f32(2, 3, 4), f32(2, 4, 5)], (), (0, 1), (), 0),
        ("aten.layer_norm.default", [X], ([8],), (0,), (), 2 * ROW),
        ("aten.gelu.default", [X], (), (0,), (), 0),
        ("aten.silu.default", [X], (), (0,), (), 0),
        ("aten.relu.default", [X], (), (), (0,), 0),
        ("aten.tanh.default", [X], (), (), (0,), 0),
        ("aten.softmax.int", [X], (-1,), (), (0,), 0),
        ("aten.rsqrt.default", [X], (), (), (0,), 0),
        ("aten.pow.Tensor_Scalar", [X], (2,), (0,), (), 0),
        ("aten.mul.Tensor", [X, X], (), (0, 1), (), 0),
        ("aten.mul.Tensor", [X, f32(2, 3, 8, grad=False)], (), (1,), (), 0),
        ("aten.mul.Tensor", [X], (0.5,), (), (), 0),
        ("aten.add.Tensor", [X, X], (), (), (), 0),
        ("aten.sum.dim_IntList", [X], ([2],), (), (), 0),
        ("aten.embedding.default", [f32(10, 8), i64(2, 3)], (), (1,), (), 0),
        ("aten.native_dropout.default", [X], (0.1, True), (), (1,), 0),
        # log_softmax and the total weight
        ("aten.cross_entropy_loss.default", [f32(6, 10), i64(6)], (), (1,), (), 240 + 4),
        # flash attention: q, k, v, the result, and one float per query and head
        (
            "aten.scaled_dot_product_attention.default",
            [f32(2, 4, 8, 16)] * 3,
            (),
            (0, 1, 2),
            (0,),
            2 * 4 * 8 * 4,
        ),
    ],
)
def test_what_autograd_keeps(
    target: str,
    operands: list[TensorSpec],
    rest: tuple[Arg, ...],
    operands_kept: tuple[int, ...],
    outputs_kept: tuple[int, ...],
    bytes_kept: int,
) -> None:
    rest = tuple(tuple(a) if isinstance(a, list) else a for a in rest)
    got = probe(target, operands, *rest)
    assert got.saved_operands == operands_kept
    assert got.saved_outputs == outputs_kept
    assert got.saved_bytes == bytes_kept


def test_views_make_nothing_and_their_gradient_is_the_incoming_one() -> None:
    view = probe("aten.view.default", [X], (6, 8))
    assert (view.outputs[0].storage, view.outputs[0].num_bytes) == (0, 0)
    assert view.gradients == (0,)
    permuted = probe("aten.permute.default", [X], (2, 0, 1))
    assert permuted.outputs[0].spec.strides == (1, 24, 8)
    expanded = probe("aten.expand.default", [f32(1, 8)], (6, 8))
    assert expanded.outputs[0].storage == 0
    assert expanded.fresh_gradient_bytes == (32,)


def test_a_split_shares_its_operand_and_fills_one_gradient() -> None:
    parts = probe("aten.split.Tensor", [X], 4, -1)
    assert [o.storage for o in parts.outputs] == [0, 0]
    assert parts.gradients == (2,) and parts.fresh_gradient_bytes == (X_BYTES,)


def test_gradients_are_new_or_the_incoming_one() -> None:
    added = probe("aten.add.Tensor", [X, f32(8)])
    assert added.gradients == (0, 1) and added.fresh_gradient_bytes == (32,)
    frozen = probe("aten.mul.Tensor", [X, f32(2, 3, 8, grad=False)])
    assert frozen.gradients == (1, NO_GRADIENT)
    # cross-entropy: the gradient of log_softmax beside that of the logits
    loss = probe("aten.cross_entropy_loss.default", [f32(6, 10), i64(6)])
    assert (loss.fresh_gradient_bytes, loss.backward_scratch_bytes) == ((240,), 240)


def test_a_copy_depends_on_the_strides() -> None:
    straight = probe("aten.reshape.default", [f32(2, 3, 8)], (6, 8))
    crossed = probe(
        "aten.reshape.default", [TensorSpec((2, 3, 8), (1, 2, 6), "float32", True)], (6, 8)
    )
    assert straight.outputs[0].storage == 0
    assert crossed.outputs[0].storage == NEW_STORAGE and crossed.outputs[0].num_bytes == X_BYTES


def test_dtype_and_device_constants_are_bound() -> None:
    cast = PROBER(
        ProbeKey(
            "aten._to_copy.default", (Ref(0),), (("dtype", Symbol("dtype", "bfloat16")),), (X,)
        )
    )
    assert cast.outputs[0].spec.dtype == "bfloat16" and cast.outputs[0].num_bytes == X_BYTES // 2
    made = PROBER(
        ProbeKey("aten.arange.default", (6,), (("device", Symbol("device", "cuda")),), ())
    )
    assert made.outputs[0].num_bytes == 48 and made.gradients == ()


def test_a_probe_is_run_once_and_allocates_nothing() -> None:
    prober = CountingProber()
    huge = dense_spec((2**20, 2**20), "bfloat16", True)
    key = ProbeKey("aten.gelu.default", (Ref(0),), (), (huge,))
    assert prober(key).outputs[0].num_bytes == 2**41
    assert prober(key) is prober(key) and prober.num_probes == 1


def test_an_unknown_op_is_named() -> None:
    with pytest.raises(UnsupportedOpError, match="has no op aten.nonsense.default"):
        probe("aten.nonsense.default", [X])


def test_the_counter_sees_storages_come_and_go() -> None:
    known = torch.zeros(4)
    with StorageCounter([known]) as counter:
        a = known + 1
        b = a.view(2, 2)
        del a
        assert counter.current_bytes == 16
        c = b * 2
        del b
        known.add_(1)
    assert (counter.current_bytes, counter.peak_bytes) == (16, 32)
    del c
    assert counter.current_bytes == 0


def _sample_keys() -> list[ProbeKey]:
    found = []
    for _, make in SAMPLES:
        sample = make()
        graph = sample.graph
        op = graph.ops[0]
        specs = tuple(
            TensorSpec(v.shape, t.stride(), v.dtype, v.requires_grad)
            for v, t in zip(graph.values, sample.tensors, strict=False)
        )
        found.append(ProbeKey(op.target, op.args, op.kwargs, specs))
    return found


def test_meta_tensors_answer_as_fake_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    # Recurrences have a fused kernel on the CPU, and its factors of an SVD have other strides than
    # a GPU's: that is not what is probed.
    of_cpus = {*RECURRENCES, "aten._linalg_svd.default"}
    keys = [key for key in _sample_keys() if key.target not in of_cpus]
    fast = list(map(OpProber(), keys))
    monkeypatch.setattr(
        meshfold.memory_probe.prober, "DEVICE_OPS", frozenset(key.target for key in keys)
    )
    assert list(map(_normal, fast)) == [_normal(OpProber()(key)) for key in keys]


def _normal(probe: OpProbe) -> OpProbe:
    """The stride of a dim of one entry says nothing."""

    def normal(output: ProbedOutput) -> ProbedOutput:
        pairs = zip(output.spec.shape, output.spec.strides, strict=True)
        strides = tuple(stride if size > 1 else 1 for size, stride in pairs)
        return replace(output, spec=replace(output.spec, strides=strides))

    return replace(probe, outputs=tuple(map(normal, probe.outputs)))


def test_of_keys_that_go_round_a_rank_keeps_its_own() -> None:
    """4 ranks with 64 rows each: query, key, value, the result, and a number a row and head."""
    spec = dense_spec((1, 2, 64, 8), "bfloat16", True)
    whole = dense_spec((1, 2, 256, 8), "bfloat16", True)
    call = (Ref(0), Ref(1), Ref(2), None, True, 4)
    found = OpProber()(ProbeKey("meshfold.ring_attention.default", call, (), (spec,) * 3))
    assert (found.saved_operands, found.saved_outputs) == ((0, 1, 2), (0,))
    assert found.saved_bytes == 2 * 64 * 4
    # Two of keys and values, the sums in 32 bits; never all keys.
    assert 4 * spec.num_bytes < found.forward_scratch_bytes < 3 * whole.num_bytes
