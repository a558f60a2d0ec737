"""Linear layers probed at two sizes: the answer is that of a run at the size asked for."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.programs.memory import CountingProber

from meshfold.cost_models.memory.op_memory import OpProbe, ProbeKey, TensorSpec, dense_spec
from meshfold.ir.op_graph import Ref
from meshfold.memory_probe.linear import linear_at_size, linear_samples
from meshfold.memory_probe.prober import OpProber

PROBER = OpProber()


def run(key: ProbeKey) -> OpProbe:
    """The answer of a run at the size of the key."""
    return PROBER._probe(key)


def key_of(operands: list[TensorSpec], target: str = "aten.linear.default") -> ProbeKey:
    return ProbeKey(target, tuple(Ref(k) for k in range(len(operands))), (), tuple(operands))


def linear(
    leading: tuple[int, ...], width: int, out: int, *, grads: str = "111", dtype: str = "float32"
) -> ProbeKey:
    """A linear layer; `grads` has a digit for x, weight and, if it has one, bias."""
    shapes = ((*leading, width), (out, width), (out,))
    return key_of(
        [dense_spec(shape, dtype, g == "1") for shape, g in zip(shapes, grads, strict=False)]
    )


dims = st.integers(1, 40)
grads = st.sampled_from(["111", "11", "01", "011", "10", "100", "000", "00", "010", "110"])


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple),
    dims,
    dims,
    grads,
    st.sampled_from(["float32", "bfloat16", "float64"]),
)
@settings(deadline=None, max_examples=80)
def test_it_is_what_a_run_says(leading, width, out, grads, dtype) -> None:
    key = linear(leading, width, out, grads=grads, dtype=dtype)
    assert PROBER(key) == run(key)


def addmm(rows: int, width: int, out: int, grads: str = "111") -> ProbeKey:
    """The same as a product of matrices; `grads` for bias, x and weight."""
    shapes = ((out,), (rows, width), (width, out))
    specs = [dense_spec(s, "float32", g == "1") for s, g in zip(shapes, grads, strict=True)]
    return key_of(specs, "aten.addmm.default")


@given(dims, dims, dims, st.sampled_from(["111", "011", "101", "110", "000", "001", "010"]))
@settings(deadline=None, max_examples=60)
def test_a_product_with_a_bias_is_what_a_run_says(rows, width, out, grads) -> None:
    key = addmm(rows, width, out, grads)
    assert PROBER(key) == run(key)


def test_two_runs_serve_all_sizes_of_a_product_with_a_bias() -> None:
    prober = CountingProber()
    for width in range(3, 20):
        prober(addmm(24, width, 2 * width))
    assert prober.num_probes == 2


@pytest.mark.parametrize("size", [(2, 2, 4096), (4096, 2, 2), (2, 4096, 2), (512, 8192, 1024)])
def test_any_size_may_be_the_largest(size: tuple[int, int, int]) -> None:
    rows, width, out = size
    for key in (
        linear((rows,), width, out),
        linear((2, rows), width, out),
        addmm(rows, width, out),
    ):
        assert PROBER(key) == run(key)


def test_two_runs_serve_all_sizes() -> None:
    prober = CountingProber()
    for width in range(3, 20):
        prober(linear((4, 6), width, 2 * width))
    assert prober.num_probes == 2


@pytest.mark.parametrize(
    "key",
    [
        key_of([dense_spec((3, 5), "float32", True)] * 2, "aten.mm.default"),
        addmm(1, 4, 5),
        key_of(
            [dense_spec(s, "float32", True) for s in ((3, 5), (3, 4), (4, 5))], "aten.addmm.default"
        ),
        linear((3, 1), 4, 5),
        linear((3,), 4, 1),
        linear((0,), 4, 5),
        linear((), 4, 5),
        linear((2,) * 6, 4, 5),
        linear((32,), 512, 2),
        linear((64,), 4, 512),
        key_of([TensorSpec((3, 4), (1, 3), "float32", True), dense_spec((5, 4), "float32", True)]),
        key_of([dense_spec((3, 4), "float64", True), dense_spec((5, 4), "float32", True)]),
    ],
    ids="other,product of a row,two-dim bias,one row,one column,empty,vector,seven dims,"
    "first,second,strided,dtypes".split(","),
)
def test_other_calls_are_run_at_their_size(key: ProbeKey) -> None:
    assert linear_samples(key) is None


@pytest.mark.parametrize(
    ("field", "num_bytes"),
    [
        ("saved_bytes", 4 * 3),
        ("saved_bytes", 4 * 16384 * 16),
        ("saved_bytes", 3),
        ("forward_scratch_bytes", 4 * 64),
        ("backward_scratch_bytes", 4 * 64),
    ],
    ids=["no bias", "too many", "no elements", "forward scratch", "backward scratch"],
)
def test_bytes_that_are_no_full_tensors_are_not_scaled(field: str, num_bytes: int) -> None:
    key = linear((4, 6), 7, 5)
    samples = linear_samples(key)
    assert samples is not None
    answer = run(samples[0])
    assert linear_at_size(answer, key) == run(key)
    odd = OpProbe(**{**{f: getattr(answer, f) for f in answer.__slots__}, field: num_bytes})
    assert linear_at_size(odd, key) is None


def test_scratch_at_the_other_size_means_a_run_at_every_size() -> None:
    prober = CountingProber()
    key = linear((4, 6), 7, 5)
    samples = linear_samples(key)
    assert samples is not None
    second = run(samples[1])
    prober._known[samples[1]] = OpProbe(second.outputs, backward_scratch_bytes=8)
    assert prober(key) == run(key)
    assert prober.num_probes == 2
