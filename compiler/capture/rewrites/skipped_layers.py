"""A captured program as it is where every layer that LayerDrop may skip is skipped.

What meshfold.capture.trace.layer_drop writes, where(rand < p, x, layer(x)), becomes x.
"""

from dataclasses import replace

from meshfold.capture.trace.raw_program import Key, Operand, RawArg, RawOp, RawProgram

_WHERE = "aten.where.self"
_RAND = "aten.rand.default"
_BELOW = ("aten.lt.Scalar", "aten.le.Scalar")
_ABOVE = ("aten.gt.Scalar", "aten.ge.Scalar")


def with_skips(program: RawProgram) -> RawProgram:
    """`program` without those choices."""
    makers: dict[Key, RawOp] = {key: op for op in program.ops for key in op.outputs}
    instead: dict[Key, Key] = {}

    def settled(arg: RawArg) -> RawArg:
        if isinstance(arg, tuple):
            return tuple(map(settled, arg))
        return Operand(instead.get(arg.key, arg.key)) if isinstance(arg, Operand) else arg

    ops = []
    for op in program.ops:
        kwargs = tuple((name, settled(arg)) for name, arg in op.kwargs)
        op = replace(op, args=tuple(map(settled, op.args)), kwargs=kwargs)
        compared = _comparison(op, makers) if op.target == _WHERE else None
        if compared is None:
            ops.append(op)
        else:
            instead[op.outputs[0]] = op.args[1 if compared in _BELOW else 2].key
    outputs = [(name, instead.get(key, key)) for name, key in program.outputs]
    mutations = [(name, instead.get(key, key)) for name, key in program.mutations]
    return replace(program, ops=ops, outputs=outputs, mutations=mutations)


def _comparison(where: RawOp, makers: dict[Key, RawOp]) -> str | None:
    """The comparison of one drawn number with a constant that decides a choice."""
    compared = makers.get(where.args[0].key)
    while compared is not None and compared.target in ("aten.reshape.default", "aten.view.default"):
        compared = makers.get(compared.args[0].key)
    if compared is None or compared.target not in (*_BELOW, *_ABOVE):
        return None
    drawn = makers.get(compared.args[0].key)
    return compared.target if drawn is not None and drawn.target == _RAND else None
