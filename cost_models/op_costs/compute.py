"""Work of one op: floating point operations and bytes of memory traffic, forward and backward.

On *global* shapes; a rule that splits its op divides by the axis size. Backward work follows from
which operands need a gradient. Times come from CostModel.op_s.

    GEMM family   flops 2 m n k; each gradient (of either factor) is one more GEMM of 2 m n k;
                  expert_linear as one GEMM of all rows, that reads the weights of all experts;
                  einsum 2 * the product of all its letters, as often as it has gaps
    attention     2 GEMMs forward, 5 backward (the scores are recomputed): 2 b h sq sk (d + dv)
                  forward, 2.5 times that backward (Dao et al., FlashAttention, NeurIPS 2022,
                  appendix B); a causal op does half of the square
    convolution   2 * outputs * (input channels / groups) * kernel elements, as a GEMM otherwise;
                  transposed 2 * inputs * (output channels / groups) * kernel elements
    batch norm    on the statistics of the batch reads x twice, backward x and the gradient twice
    pooling       a maximum writes where it was found (int64); backward reads that and not x
    views         nothing forward; backward of slicing and splitting fills the whole gradient,
                  of expand sums it
    bags          read the row of every id, whose gradient is dense
    recurrences   2 GEMMs a step, layer and direction; the weights of the state are read in every
                  step. Backward twice that
    losses        passes over the logits; of narrow ones, over rows of them widened; of those that
                  a loss makes itself, their GEMM, too, which backward does again
    gated         a product and what it is gated by, computed again in backward
    cdist         3 * the product of rows, rows and width; as much for each gradient
    other         memory-bound: every operand read and every result written once; backward reads
                  the gradients of the results and the operands, writes the operands' gradients

Pure counting: there are no fitted constants here.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshfold.cost_models.op_costs.attention import Scores
from meshfold.cost_models.op_costs.einsum import dims_of
from meshfold.ir.custom_ops import CustomCosts
from meshfold.ir.op_graph import ITEM_BYTES, Op, OpGraph, Value

# Positions of the two factors among the operands.
MATMUL_FACTORS = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "matmul": (0, 1),
    "mv": (0, 1),
    "dot": (0, 1),
    "vdot": (0, 1),
    "linear": (0, 1),
    "addmm": (1, 2),
    "baddbmm": (1, 2),
    "_grouped_mm": (0, 1),
    "expert_linear": (0, 1),
    "matmul_reduce_scatter": (0, 1),
}

_ATTENTION = (
    "scaled_dot_product_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)

_CONVOLUTIONS = (
    "convolution",
    *(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)),
)

_RECURRENCES = ("lstm", "gru", "rnn_tanh", "rnn_relu")

_TRAINED_BATCH_NORMS = ("_native_batch_norm_legit_functional", "_native_batch_norm_legit")

_POOLS = tuple(
    f"{kind}{n}d{indices}"
    for kind in ("max_pool", "adaptive_max_pool", "avg_pool", "adaptive_avg_pool")
    for n in (1, 2, 3)
    for indices in ("", "_with_indices")
)

PRODUCTS = frozenset(
    (
        *MATMUL_FACTORS,
        "all_gather_matmul",
        "linear_cross_entropy",
        "einsum",
        *_ATTENTION,
        *_CONVOLUTIONS,
        *_RECURRENCES,
    )
)
"""Ops with many flops per byte (names as op_name gives them): what they make is dear to make again.
All other ops are bound by memory."""

VIEWS = frozenset(
    """alias broadcast_tensors detach expand expand_as flatten lift_fresh movedim narrow numpy_T
    permute reshape squeeze swapaxes t transpose unflatten unsqueeze view view_as _unsafe_view
    select slice split split_with_sizes chunk unbind diagonal view_as_complex view_as_real
    unfold""".split()
)
"""Ops that move no bytes (reshape and flatten may copy a strided operand; not charged)."""

_PART_VIEWS = frozenset(
    "select slice narrow split split_with_sizes chunk unbind diagonal unfold".split()
)

_LOOKUPS = frozenset("embedding gather index index_select take_along_dim".split())


_NAMESPACES = ("aten.", "meshfold.")


@dataclass(frozen=True, slots=True)
class Work:
    """What one op does: flops and bytes of memory traffic, each for forward and backward."""

    flops: float
    num_bytes: float
    backward_flops: float
    backward_bytes: float
    scores: Scores | None = None
    """Of attention, whose kernels have a rate of their own."""
    inner_bytes: tuple[float, float] = (0.0, 0.0)
    """Of these bytes those of what the op makes inside: divided as its flops are."""


def op_name(target: str) -> str:
    """ "linear" for "aten.linear.default": the op without its namespace and overload. An op of
    another namespace, or a Function, is none of these: it keeps its full name."""
    if not target.startswith(_NAMESPACES):
        return target
    parts = target.split(".")
    return parts[1] if len(parts) > 2 else parts[-1]


def op_work(graph: OpGraph, op: Op) -> Work:
    """Work of `op` on the global shapes of `graph`; none of an op whose rule states its work, which
    is so on local shapes alone (stated_work)."""
    name = op_name(op.target)
    if op.custom is not None and op.custom.costs.states_work:
        return Work(0, 0, 0, 0)
    for names, counter in _COUNTERS:
        if name in names:
            return counter(graph, op)
    return _memory_bound(graph, op)


def stated_work(
    costs: CustomCosts, shapes: Sequence[Sequence[int]], graph: OpGraph, op: Op, share: float
) -> Work:
    """Work of an op as its rule states it, on local shapes of its operands. What it does not state
    is that of an op bound by memory, `share` of it; flops of a backward are twice those of the
    forward."""
    moved = _memory_bound(graph, op)
    flops = costs.flops(*shapes) if costs.flops else 0.0
    is_trained = moved.backward_bytes > 0
    return Work(
        flops,
        costs.num_bytes(*shapes) if costs.num_bytes else moved.num_bytes * share,
        is_trained * (costs.backward_flops(*shapes) if costs.backward_flops else 2 * flops),
        is_trained
        * (costs.backward_bytes(*shapes) if costs.backward_bytes else moved.backward_bytes * share),
    )


def _operands(graph: OpGraph, op: Op) -> list[Value]:
    return [graph.values[v] for v in op.operands]


def _results(graph: OpGraph, op: Op) -> list[Value]:
    return [graph.values[v] for v in op.outputs]


def _total_bytes(values: Sequence[Value]) -> int:
    return sum(v.num_bytes for v in values)


def _traffic(graph: OpGraph, op: Op) -> tuple[int, int]:
    """Bytes read and written forward; bytes read and written backward."""
    operands, results = _operands(graph, op), _results(graph, op)
    forward = _total_bytes(operands) + _total_bytes(results)
    wanted = [v for v in operands if v.requires_grad]
    if not wanted:
        return forward, 0
    incoming = _total_bytes([v for v in results if v.is_float])
    return forward, incoming + _total_bytes(operands) + _total_bytes(wanted)


def _memory_bound(graph: OpGraph, op: Op) -> Work:
    forward, backward = _traffic(graph, op)
    return Work(0, forward, 0, backward)


def _matmul(graph: OpGraph, op: Op) -> Work:
    first, second = MATMUL_FACTORS[op_name(op.target)]
    operands, results = _operands(graph, op), _results(graph, op)
    # Every element of the result is a dot product over the last dim of the left factor.
    left, right = operands[first], operands[second]
    flops = 2 * math.prod(results[0].shape) * left.shape[-1]
    forward, backward = _traffic(graph, op)
    return Work(flops, forward, flops * (left.requires_grad + right.requires_grad), backward)


def _several_products(graph: OpGraph, op: Op) -> Work:
    """The work of products of the same rows with several weights."""
    x, *weights = _operands(graph, op)[: 1 + len(op.outputs)]
    rows = 2 * math.prod(x.shape)
    each = [rows * out.shape[-1] for out in _results(graph, op)]
    forward, backward = _traffic(graph, op)
    back = sum(
        flops * (x.requires_grad + weight.requires_grad)
        for flops, weight in zip(each, weights, strict=True)
    )
    return Work(sum(each), forward, back, backward)


def _einsum(graph: OpGraph, op: Op) -> Work:
    """Each letter counts once: of two operands it is their GEMM. Of more, as if each joined the
    result at its full size."""
    operands = _operands(graph, op)
    forward, backward = _traffic(graph, op)
    equation = op.args[0]
    assert isinstance(equation, str)
    letters = dims_of(equation, [v.shape for v in operands])
    if letters is None:
        return Work(0, forward, 0, backward)
    sizes: dict[str, int] = {}
    for term, value in zip(letters, operands, strict=False):
        for letter, size in zip(term, value.shape, strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1))
    flops = 2 * math.prod(sizes.values()) * max(len(operands) - 1, 0)
    return Work(flops, forward, flops * sum(v.requires_grad for v in operands), backward)


def _attention(graph: OpGraph, op: Op) -> Work:
    query, key, value = _operands(graph, op)[:3]
    rows = math.prod(query.shape[:-1])  # batch x heads x query length
    widths = query.shape[-1] + value.shape[-1]
    scores = Scores(rows * key.shape[-2], widths / 2)
    flops = 2 * scores.num / (2 if _is_causal(op) else 1) * widths
    forward, backward = _traffic(graph, op)
    return Work(flops, forward, 2.5 * flops if backward else 0, backward, scores)


def _is_causal(op: Op) -> bool:
    """Argument `is_causal` of any of the attention ops: by keyword, else the first plain bool (it
    comes before every other flag in all overloads)."""
    named = dict(op.kwargs)
    if "is_causal" in named:
        return named["is_causal"] is True
    bools = [a for a in op.args if isinstance(a, bool)]
    return bool(bools) and bools[0]


def _convolution(graph: OpGraph, op: Op) -> Work:
    operands, results = _operands(graph, op), _results(graph, op)
    image, weight = operands[:2]
    # weight: (output channels, input channels / groups, *kernel): its dims after the first are the
    # dot product behind each result. Transposed, they are what each input element is spread over.
    name = op_name(op.target)
    is_flagged = name == "convolution" and len(op.args) > 6 and op.args[6] is True
    transposed = is_flagged or name.startswith("conv_transpose")
    points = image.shape if transposed else results[0].shape
    flops = 2 * math.prod(points) * math.prod(weight.shape[1:])
    forward, backward = _traffic(graph, op)
    return Work(flops, forward, flops * (image.requires_grad + weight.requires_grad), backward)


def _view(graph: OpGraph, op: Op) -> Work:
    operands = _operands(graph, op)
    if not operands or not operands[0].requires_grad:
        return Work(0, 0, 0, 0)
    whole, parts = operands[0].num_bytes, _total_bytes(_results(graph, op))
    name = op_name(op.target)
    if name in _PART_VIEWS:
        return Work(0, 0, 0, whole + parts)
    if name in ("expand", "expand_as") and parts > whole:
        return Work(0, 0, 0, whole + parts)
    return Work(0, 0, 0, 0)


def _lookup(graph: OpGraph, op: Op) -> Work:
    """Reads only the rows asked for; the gradient of the table is dense: zeros, then added to."""
    operands, results = _operands(graph, op), _results(graph, op)
    table = operands[0]
    moved = 2 * _total_bytes(results) + _total_bytes(operands[1:])
    backward = table.num_bytes + moved if table.requires_grad else 0
    return Work(0, moved, 0, backward)


def _recurrence(graph: OpGraph, op: Op) -> Work:
    """Every matrix among the parameters is multiplied with a row per step and sample; that of the
    state, the second of each layer and direction, cannot be used for all steps at once."""
    x, *rest = _operands(graph, op)
    batch_dim = 0 if op.args[8] is True else 1
    steps, batch = x.shape[1 - batch_dim], x.shape[batch_dim]
    matrices = [v for v in rest if len(v.shape) == 2]
    flops = 2 * steps * batch * sum(math.prod(v.shape) for v in matrices)
    again = (steps - 1) * _total_bytes(matrices[1::2])
    forward, backward = _traffic(graph, op)
    if not backward:
        return Work(flops, forward + again, 0, 0)
    return Work(flops, forward + again, 2 * flops, backward + again)


def _bags(graph: OpGraph, op: Op) -> Work:
    """Reads the rows of every bag; the gradient of the table is dense: zeros, then added to."""
    table, *rest = _operands(graph, op)
    (bags,) = _results(graph, op)
    rows = math.prod(rest[0].shape) * table.num_bytes // table.shape[0]
    forward = rows + _total_bytes(rest) + bags.num_bytes
    wanted = [v for v in rest if v.requires_grad]
    dense = table.num_bytes + rows if table.requires_grad else 0
    weights = rows + _total_bytes(wanted) if wanted else 0
    back = dense + weights
    return Work(0, forward, 0, back + bags.num_bytes + rest[0].num_bytes if back else 0)


def _trained_batch_norm(graph: OpGraph, op: Op) -> Work:
    """Statistics, then the result; backward two sums, then the gradient of x."""
    forward, backward = _traffic(graph, op)
    x_bytes, y_bytes = _operands(graph, op)[0].num_bytes, _results(graph, op)[0].num_bytes
    return Work(0, forward + x_bytes, 0, backward + x_bytes + y_bytes if backward else 0)


def _pool(graph: OpGraph, op: Op) -> Work:
    """Reads x, writes the result, for a maximum with indices; backward spreads the gradient."""
    x, y = _operands(graph, op)[0], _results(graph, op)[0]
    is_max = "max" in op_name(op.target)
    indices = math.prod(y.shape) * ITEM_BYTES["int64"] if is_max else 0
    backward = y.num_bytes + indices + x.num_bytes if x.requires_grad else 0
    return Work(0, x.num_bytes + y.num_bytes + indices, 0, backward)


def _cross_entropy(graph: OpGraph, op: Op) -> Work:
    """log_softmax (read logits, write as much), then a pick from it; backward reads the saved
    log_softmax and writes the gradient of the logits."""
    logits = _operands(graph, op)[0]
    moved = 2 * logits.num_bytes
    return Work(0, moved, 0, moved if logits.requires_grad else 0)


def _narrow_cross_entropy(graph: OpGraph, op: Op) -> Work:
    """Passes over the logits, widened (to 4 bytes a number at least). Forward: the cast, the
    maximum, a difference, its exponential, their sum. Backward: the cast, a difference, its
    exponential, times the gradients of the rows, and back."""
    logits = _operands(graph, op)[0]
    wide = logits.num_bytes * max(4, ITEM_BYTES[logits.dtype]) // ITEM_BYTES[logits.dtype]
    cast = logits.num_bytes + wide if wide > logits.num_bytes else 0
    backward = 2 * cast + 6 * wide if logits.requires_grad else 0
    return Work(0, cast + 6 * wide, 0, backward)


def _linear_cross_entropy(graph: OpGraph, op: Op) -> Work:
    """The product, and the passes over its result, which is made again in backward."""
    x, matrix = _operands(graph, op)[:2]
    num_logits = x.shape[0] * matrix.shape[0]
    flops, narrow = 2 * num_logits * x.shape[1], num_logits * ITEM_BYTES[x.dtype]
    cast = (narrow + (wide := max(4 * num_logits, narrow))) * (wide > narrow)
    forward, backward = _traffic(graph, op)
    passes = narrow + cast + 6 * wide
    gradients = x.requires_grad + matrix.requires_grad
    again = (2 * cast + 6 * wide + (1 + gradients) * narrow) * bool(gradients)
    back = (flops * (1 + gradients), backward + again) if gradients else (0, 0)
    return Work(flops, forward + passes, *back, inner_bytes=(passes, again))


def _gated_product(graph: OpGraph, op: Op) -> Work:
    """An activation and a product; backward two products, the slope, and the activation again."""
    gate, x = _operands(graph, op)
    of_gate, of_x = (6 * gate.requires_grad, 5 * x.requires_grad)
    return Work(0, 5 * gate.num_bytes, 0, (of_gate + of_x) * gate.num_bytes)


def _distances(graph: OpGraph, op: Op) -> Work:
    """A difference, its power and a sum per pair of rows and column."""
    operands = _operands(graph, op)
    flops = 3 * math.prod(_results(graph, op)[0].shape) * operands[0].shape[-1]
    forward, backward = _traffic(graph, op)
    return Work(flops, forward, flops * sum(v.requires_grad for v in operands), backward)


_COUNTERS: tuple[tuple[Sequence[str] | frozenset[str], Callable[[OpGraph, Op], Work]], ...] = (
    (tuple(MATMUL_FACTORS), _matmul),
    (("all_gather_matmul",), _several_products),
    (("einsum",), _einsum),
    (("cdist",), _distances),
    (_ATTENTION, _attention),
    (_CONVOLUTIONS, _convolution),
    (_TRAINED_BATCH_NORMS, _trained_batch_norm),
    (_POOLS, _pool),
    (VIEWS, _view),
    (_LOOKUPS, _lookup),
    (("embedding_bag",), _bags),
    (_RECURRENCES, _recurrence),
    (("cross_entropy_loss",), _cross_entropy),
    (("cross_entropy",), _narrow_cross_entropy),
    (("linear_cross_entropy",), _linear_cross_entropy),
    (("gated_product",), _gated_product),
)
