"""Attention whose query heads share key heads reads these once.

Hugging Face repeats the key and value heads for their groups of query heads wherever it hands
attention a mask, and by then it is too late to see that the mask says no more than "causal"
(causal_masks.py): the copies, one for each query head, are kept for the backward. Attention with
enable_gqa takes the heads as they are, and adds up the gradients of a group.

    unsqueeze -> expand -> clone -> reshape -> attention    becomes    attention(enable_gqa)

Attention in float32 stays: with groups no fused kernel of CUDA takes it, and scores would go
through memory. The same holds for attention with a mask.
"""

from dataclasses import replace

from meshfold.capture.rewrites.causal_masks import ATTENTION, named_arguments
from meshfold.capture.rewrites.patterns import Patterns
from meshfold.capture.trace.raw_program import Operand, RawArg, RawOp, RawProgram

_COPIES = "aten.clone.default"


def with_grouped_queries(program: RawProgram) -> RawProgram:
    """`program` without repeated heads before attention."""
    if not any(op.target == ATTENTION for op in program.ops):
        return program
    patterns = Patterns(program)
    ops = [_grouped(patterns, op) or op if op.target == ATTENTION else op for op in program.ops]
    return replace(program, ops=ops)


def _grouped(patterns: Patterns, op: RawOp) -> RawOp | None:
    """Attention on heads that are not repeated; None where they are not, or something else is."""
    given = named_arguments(op)
    if given.get("attn_mask") is not None or given.get("enable_gqa", False):
        return None
    query, *repeated = (given.pop(name) for name in ("query", "key", "value"))
    heads = [_before_repeat(patterns, arg) for arg in repeated]
    values = [patterns.value(arg) for arg in (query, *heads)]
    if any(value is None or value.dtype == "float32" for value in values):
        return None
    of_query, of_key, of_value = (value.shape for value in values if value is not None)
    if of_key[1] != of_value[1] or of_query[1] % of_key[1]:
        return None
    rest = {name: arg for name, arg in given.items() if name != "attn_mask"}
    kwargs = tuple((rest | {"enable_gqa": True}).items())
    return replace(op, args=(query, *heads), kwargs=kwargs)


def _before_repeat(patterns: Patterns, arg: RawArg) -> RawArg:
    """The heads [b, g, t, e] that `arg` [b, g * r, t, e] has r times each, neighbours; None if it
    is nothing of the kind."""
    joined = patterns.inner(arg, "aten.reshape.default")
    source = joined.args[0] if joined else None
    copy = patterns.inner(source, _COPIES)
    expanded = patterns.inner(copy.args[0] if copy else source, "aten.expand.default")
    apart = patterns.inner(expanded.args[0], "aten.unsqueeze.default") if expanded else None
    if expanded is None or apart is None:
        return None
    stages = (apart.args[0], expanded.args[0], Operand(expanded.outputs[0]), arg)
    shapes = [value.shape for value in map(patterns.value, stages) if value is not None]
    if len(shapes) < 4 or len(shapes[0]) != 4 or len(shapes[2]) != 5:
        return None
    (b, g, t, e), repeats = shapes[0], shapes[2][2]
    wanted = [(b, g, t, e), (b, g, 1, t, e), (b, g, repeats, t, e), (b, g * repeats, t, e)]
    return apart.args[0] if shapes == wanted else None
