"""Cross entropy of logits that are widened first becomes meshfold::cross_entropy of the logits as
they are (meshfold.ops.vocab_parallel_cross_entropy).

    cross_entropy(views of (logits to float32), numbers of classes)

The views are taken of the narrow logits. The losses are the same: what is computed in float32 is
what was. Where the widened logits are an output of the model, they are made for that alone.
"""

from dataclasses import replace

from meshfold.capture.rewrites.patterns import Patterns
from meshfold.capture.trace.raw_program import Operand, RawArg, RawOp, RawProgram
from meshfold.passes.rules.ops.loss import CROSS_ENTROPY, NARROW_CROSS_ENTROPY

_VIEWS = tuple(
    f"aten.{name}"
    for name in (
        "reshape.default view.default _unsafe_view.default slice.Tensor clone.default "
        "alias.default contiguous.default permute.default transpose.int flatten.using_ints"
    ).split()
)
_WIDE = "float32"


def with_narrow_logits(program: RawProgram) -> RawProgram:
    """`program` whose losses over classes read narrow logits."""
    losses = [op for op in program.ops if op.target == CROSS_ENTROPY]
    if not losses:
        return program
    patterns = Patterns(program)
    values, changed = dict(program.values), dict[str, RawOp]()
    for loss in losses:
        chain = _views_of_cast(patterns, loss)
        target = patterns.value(loss.args[1]) if len(loss.args) > 1 else None
        if not chain or target is None or target.is_float:
            continue
        *views, cast = chain
        narrow: RawArg = cast.args[0]
        for op in reversed(views):
            changed[op.outputs[0]] = replace(op, args=(narrow, *op.args[1:]))
            out = op.outputs[0]
            values[out] = replace(values[out], dtype=values[narrow.key].dtype)
            narrow = Operand(out)
        args = (narrow, *loss.args[1:])
        changed[loss.outputs[0]] = replace(loss, target=NARROW_CROSS_ENTROPY, args=args)
    ops = [changed.get(op.outputs[0], op) if op.outputs else op for op in program.ops]
    return replace(program, ops=ops, values=values)


def _views_of_cast(patterns: Patterns, loss: RawOp) -> list[RawOp]:
    """The views of its logits, last first, then the cast that widens them; empty if none does."""
    chain: list[RawOp] = []
    arg = loss.args[0]
    while (view := patterns.inner(arg, *_VIEWS)) is not None:
        chain.append(view)
        arg = view.args[0]
    narrow = patterns.value(source := patterns.before_cast(arg))
    if source == arg or narrow is None or narrow.dtype not in ("bfloat16", "float16"):
        return []
    if patterns.values[arg.key].dtype != _WIDE:
        return []
    cast = patterns.maker(arg, "aten._to_copy.default")
    assert cast is not None, "a cast was found"
    return [*chain, cast]
