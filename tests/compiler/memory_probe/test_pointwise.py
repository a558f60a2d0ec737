"""Pointwise ops probed at one size: the answer is that of a run at the size asked for."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.programs.memory import CountingProber

from meshfold.cost_models.memory.op_memory import OpProbe, ProbeKey, TensorSpec, dense_spec
from meshfold.ir.op_graph import Arg, Ref, Symbol
from meshfold.memory_probe.pointwise import at_size, pointwise_sample
from meshfold.memory_probe.prober import OpProber

PROBER = OpProber()

UNARY: list[tuple[str, tuple[Arg, ...]]] = [
    ("aten.gelu.default", ()),
    ("aten.silu.default", ()),
    ("aten.relu.default", ()),
    ("aten.sigmoid.default", ()),
    ("aten.tanh.default", ()),
    ("aten.mish.default", ()),
    ("aten.leaky_relu.default", ()),
    ("aten.hardswish.default", ()),
    ("aten.softplus.default", ()),
    ("aten.neg.default", ()),
    ("aten.exp.default", ()),
    ("aten.rsqrt.default", ()),
    ("aten.cos.default", ()),
    ("aten.pow.Tensor_Scalar", (2,)),
    ("aten.mul.Tensor", (0.5,)),
    ("aten.clamp.default", (0.0, 1.0)),
    ("aten.clone.default", ()),
    ("aten._to_copy.default", ()),
    ("aten.gt.Scalar", (0.0,)),
]
BINARY = [f"aten.{name}.Tensor" for name in ("add", "sub", "mul", "div")] + [
    "aten.maximum.default",
    "aten.eq.Tensor",
]


def run(key: ProbeKey) -> OpProbe:
    """The answer of a run at the size of the key."""
    return PROBER._probe(key)


def key_of(target: str, operands: list[TensorSpec], rest: tuple[Arg, ...] = ()) -> ProbeKey:
    refs = tuple(Ref(k) for k in range(len(operands)))
    return ProbeKey(target, (*refs, *rest), (), tuple(operands))


shapes = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)
dtypes = st.sampled_from(["float32", "bfloat16", "float64"])


@given(st.sampled_from(UNARY), shapes, dtypes, st.booleans())
@settings(deadline=None, max_examples=40)
def test_one_operand(op: tuple[str, tuple[Arg, ...]], shape, dtype, grad) -> None:
    key = key_of(op[0], [dense_spec(shape, dtype, grad)], op[1])
    assert PROBER(key) == run(key)


@given(st.sampled_from(BINARY), shapes, dtypes, st.booleans(), st.booleans())
@settings(deadline=None, max_examples=40)
def test_two_operands(target, shape, dtype, first, second) -> None:
    key = key_of(target, [dense_spec(shape, dtype, first), dense_spec(shape, dtype, second)])
    assert PROBER(key) == run(key)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cast_has_other_bytes(dtype: str) -> None:
    key = ProbeKey(
        "aten._to_copy.default",
        (Ref(0),),
        (("dtype", Symbol("dtype", "bfloat16")),),
        (dense_spec((3, 5), dtype, True),),
    )
    assert PROBER(key) == run(key)


def test_one_run_serves_all_sizes() -> None:
    prober = CountingProber()
    for width in range(3, 20):
        prober(key_of("aten.gelu.default", [dense_spec((4, width), "float32", True)]))
    assert prober.num_probes == 1


@pytest.mark.parametrize(
    ("target", "operands"),
    [
        ("aten.softmax.int", [dense_spec((3, 5), "float32", True)]),
        (
            "aten.add.Tensor",
            [dense_spec((3, 5), "float32", True), dense_spec((5,), "float32", True)],
        ),
        ("aten.gelu.default", [TensorSpec((3, 5), (1, 3), "float32", True)]),
        ("aten.gelu.default", [dense_spec((3, 0), "float32", True)]),
        ("aten.gelu.default", [dense_spec((2, 2), "float32", True)]),
        ("aten.gelu.default", [dense_spec((), "float32", True)]),
        ("aten.zeros.default", []),
    ],
    ids=["rows", "broadcast", "strided", "empty", "smallest", "scalar", "no operand"],
)
def test_other_calls_are_run_at_their_size(target: str, operands: list[TensorSpec]) -> None:
    assert pointwise_sample(key_of(target, operands)) is None


def test_bytes_that_do_not_grow_with_the_elements_are_not_scaled() -> None:
    key = key_of("aten.gelu.default", [dense_spec((4, 4), "float32", True)])
    sample = pointwise_sample(key)
    assert sample is not None
    odd = OpProbe(outputs=run(sample).outputs, saved_bytes=3)
    assert at_size(odd, key) is None
