"""torch's embedding_bag becomes meshfold::embedding_bag (meshfold.ops.embedding_bag), which has
one result.

nn.EmbeddingBag flattens ids [b, l] and makes offsets of equal bags:

    embedding_bag(table, reshape(ids, [b * l]), arange(0, b * l, l))

The op takes ids [b, l] as they were: bags can be shared among ranks by their batch then. Gradients
that are scaled by frequency, or sparse, have no rule: these keep torch's op.
"""

from collections.abc import Mapping
from dataclasses import replace

from meshfold.capture.trace.raw_program import Key, Operand, RawArg, RawOp, RawProgram
from meshfold.ir.op_graph import Value
from meshfold.ops.registry import torch_target
from meshfold.passes.rules.ops.bags import EMBEDDING_BAG

_TORCH = ("aten.embedding_bag.default", "aten.embedding_bag.padding_idx")
_ARANGE = "aten.arange.start_step"
_RESHAPE = "aten.reshape.default"


def with_bags(program: RawProgram) -> RawProgram:
    """`program` with one result for every embedding_bag."""
    makers: dict[Key, RawOp] = {key: op for op in program.ops for key in op.outputs}
    read = {key for op in program.ops for key in op.operands}
    read.update(key for _, key in (*program.outputs, *program.mutations))
    ops = [
        _written(op, makers, program.values)
        if op.target in _TORCH and read.isdisjoint(op.outputs[1:])
        else op
        for op in program.ops
    ]
    return replace(program, ops=ops)


def _written(op: RawOp, makers: Mapping[Key, RawOp], values: Mapping[Key, Value]) -> RawOp:
    schema = torch_target(op.target)._schema.arguments  # type: ignore[attr-defined]
    given: dict[str, RawArg] = {a.name: a.default_value for a in schema if a.has_default_value()}
    given |= dict(zip((a.name for a in schema), op.args, strict=False)) | dict(op.kwargs)
    if given["scale_grad_by_freq"] or given["sparse"]:
        return op
    ids, weights, offsets = given["indices"], given["per_sample_weights"], given["offsets"]
    whole = _in_rows(ids, offsets, makers, values)
    if whole is not None and not given["include_last_offset"]:
        shape = values[whole.key].shape
        if weights is None or (weights := _unflattened(weights, shape, makers, values)):
            ids, offsets = whole, None
        else:
            weights = given["per_sample_weights"]
    padding = given.get("padding_idx")
    numbers = given["mode"], given["include_last_offset"], -1 if padding is None else padding
    args = (given["weight"], ids, offsets, weights, *numbers)
    return replace(op, target=EMBEDDING_BAG, args=args, kwargs=(), outputs=op.outputs[:1])


def _in_rows(
    ids: Operand, offsets: Operand, makers: Mapping[Key, RawOp], values: Mapping[Key, Value]
) -> Operand | None:
    """ids [b, l], where `offsets` begin bags of l."""
    flat, counted = makers.get(ids.key), makers.get(offsets.key)
    if flat is None or counted is None or counted.target != _ARANGE:
        return None
    if flat.target != _RESHAPE or len(values[flat.args[0].key].shape) != 2:
        return None
    b, width = values[flat.args[0].key].shape
    found: Operand = flat.args[0]
    return found if counted.args == (0, b * width, width) else None


def _unflattened(
    weights: Operand,
    shape: tuple[int, ...],
    makers: Mapping[Key, RawOp],
    values: Mapping[Key, Value],
) -> Operand | None:
    """What `weights` flattens, if it has `shape`."""
    flat = makers.get(weights.key)
    if flat is None or flat.target != _RESHAPE or values[flat.args[0].key].shape != shape:
        return None
    found: Operand = flat.args[0]
    return found
