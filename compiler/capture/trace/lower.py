"""Read an exported program into a RawProgram: plain data, ops by name, values by key.

Settled on the way: tied names become one, equal constants become one (named by their value),
asserts go, getitem is folded, sizes written as -1 and open slices become numbers, and ops that
change nothing go.
"""

import hashlib
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, OutputSpec

from meshfold.capture.python_state.written_state import (
    STATE_WRITES,
    expect_writes,
    is_clamped,
    is_state,
    refuse_write,
)
from meshfold.capture.trace.export import KEPT, MODEL, SOURCE, Exported
from meshfold.capture.trace.fake_model import Names
from meshfold.capture.trace.functions import FUNCTION, call_number
from meshfold.capture.trace.raw_program import Key, Operand, RawArg, RawOp, RawProgram
from meshfold.errors import CaptureError
from meshfold.ir.custom_ops import CustomOp
from meshfold.ir.op_graph import ITEM_BYTES, InputInfo, Source, SourceKind, Value
from meshfold.torch_compat.dtypes import dtype_name, symbol
from meshfold.torch_compat.pytree import fill_slots

_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten._unsafe_view.default)
CAST = "aten._to_copy.default"
ALIAS = "aten.alias.default"
_SIZED = (*_VIEWS, _aten.reshape.default, _aten.expand.default)
_SYMBOLS = (torch.dtype, torch.device, torch.layout, torch.memory_format, complex)
FULL = "aten.full.default"
_FRESH = {
    _aten.new_zeros.default: 0,
    _aten.new_empty.default: 0,
    _aten.empty_like.default: 0,
    _aten.empty.memory_format: 0,
    _aten.zero.default: 0,
    _aten.new_ones.default: 1,
    _aten.new_full.default: None,
}
"""Ops that make a constant beside a tensor, or memory as it is found; the number it is full of,
None where it is given."""
OTHER_NAMES = {
    f"aten.{other}.{overload}": f"aten.{name}.{overload}"
    for others, name, overloads in (
        ("multiply", "mul", "Tensor Scalar"),
        ("divide true_divide", "div", "Tensor Scalar"),
        ("divide", "div", "Tensor_mode"),
        ("subtract", "sub", "Tensor Scalar"),
        ("concat concatenate", "cat", "default"),
        ("clip", "clamp", "default Tensor"),
        ("negative", "neg", "default"),
        ("diagonal_copy", "diagonal", "default"),
        ("unsafe_split", "split", "Tensor"),
        ("unsafe_split_with_sizes", "split_with_sizes", "default"),
        ("absolute", "abs", "default"),
        ("greater", "gt", "Tensor Scalar"),
        ("greater_equal", "ge", "Tensor Scalar"),
        ("less", "lt", "Tensor Scalar"),
        ("less_equal", "le", "Tensor Scalar"),
        ("not_equal", "ne", "Tensor Scalar"),
        ("special_expit", "sigmoid", "default"),
        ("special_erf", "erf", "default"),
        ("special_log1p", "log1p", "default"),
        ("special_expm1", "expm1", "default"),
    )
    for other in others.split()
    for overload in overloads.split()
}
"""Ops that torch has under two names: the one that rules know. Arguments are the same."""
_SAME_IF_SAME_SHAPE = (*_SIZED, _aten.alias.default, _aten.slice.Tensor)


def read_program(
    exported: Exported,
    names: Names,
    inputs: tuple[InputInfo, ...],
    found: Sequence[Source | None] = (),
) -> RawProgram:
    """found: what stands for each tensor that an earlier call has left, if it may be read.

    Raises CaptureError for an op that returns something else than tensors of fixed shape.
    """
    reader = _Reader(exported, names, inputs, found)
    for node in exported.program.graph.nodes:
        reader.read(node)
    if exported.chosen.returns.outputs:
        _set_outputs_apart(reader.program, int(exported.chosen.returns.has_loss))
    return reader.program


def _set_outputs_apart(program: RawProgram, num_losses: int) -> None:
    """Ends a program with a copy of every output but the loss, which nobody else reads: so the
    layout in which outputs leave decides nothing for the layers that read the same values."""
    apart = program.outputs[:num_losses]
    for name, key in program.outputs[num_losses:]:
        copy = f"output {name}"
        program.values[copy] = program.values[key]
        program.ops.append(RawOp(ALIAS, (Operand(key),), (), (copy,), (), ""))
        apart.append((name, copy))
    program.outputs[:] = apart


class _Reader:
    def __init__(
        self,
        exported: Exported,
        names: Names,
        inputs: tuple[InputInfo, ...],
        found: Sequence[Source | None],
    ) -> None:
        self.program = RawProgram()
        self.sources: Mapping[str, Source] = {
            **{f"{KEPT}{k}": source for k, source in enumerate(found) if source is not None},
            **names.sources,
        }
        self.names = names
        self.exported = exported
        signature = exported.program.graph_signature
        self.specs = {spec.arg.name: spec for spec in signature.input_specs}
        self.inputs = iter(inputs)
        self.infos = inputs
        self.keys: dict[fx.Node, tuple[Key | None, ...]] = {}

    def read(self, node: fx.Node) -> None:
        args: tuple[Any, ...] = node.args
        if node.op == "placeholder":
            # What an earlier call has left counts if it is read.
            if node.users or not str(self.specs[node.name].target).startswith(KEPT):
                self._read_placeholder(node)
        elif node.op == "output":
            self._read_outputs(node)
        elif node.target is operator.getitem:
            self.keys[node] = (self.keys[args[0]][args[1]],)
        elif node.op == "call_function" and not _is_assert(node):
            same = unchanged_operand(node)
            self.keys[node] = self.keys[same] if same is not None else self._read_op(node)

    def _read_placeholder(self, node: fx.Node) -> None:
        spec = self.specs[node.name]
        source = self._source(spec)
        self.keys[node] = (source,)
        self.program.values[source] = tensor_value(node.meta["val"], node)

    def _source(self, spec: InputSpec) -> Source:
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            name = str(spec.target).removeprefix(MODEL + ".")
            if name not in self.sources:
                raise CaptureError(
                    f"forward registers {name}, which the model does not have before; register it "
                    "where the model is made",
                    op="register_buffer",
                )
            return self.sources[name]
        if spec.kind is InputKind.USER_INPUT:
            return Source(SourceKind.INPUT, next(self.inputs).name)
        if spec.kind is InputKind.CONSTANT_TENSOR:
            return self._constant(self.exported.program.constants[str(spec.target)])
        if isinstance(self.exported.program.constants.get(str(spec.target)), torch.Generator):
            raise CaptureError(
                "forward draws from a torch.Generator of its own, and ranks would not agree on its "
                "draws; draw without generator=, and the plan's seed decides",
                op="torch.Generator",
            )
        raise CaptureError(
            f"the graph takes {spec.kind.name.lower()} {spec.target}, which is no tensor; "
            "make it a buffer or an argument",
            op=str(spec.target),
        )

    def _constant(self, tensor: torch.Tensor) -> Source:
        name = constant_name(tensor)
        self.program.constants[name] = tensor.detach().cpu()
        return Source(SourceKind.CONSTANT, name)

    def _read_op(self, node: fx.Node) -> tuple[Key | None, ...]:
        results = node.meta["val"]
        several = isinstance(results, (tuple, list))
        keys: list[Key | None] = []
        for k, result in enumerate(results if several else (results,)):
            key = f"{node.name}#{k}" if several else node.name
            keys.append(key if result is not None else None)
            if result is not None:
                self.program.values[key] = tensor_value(result, node)
        refuse_mutation(node)
        custom = None
        target, args, kwargs = settled(node)
        if target == FUNCTION:
            tensors, label = args
            call = self.exported.functions[call_number(label)]
            target, args = call.op.__name__, fill_slots(call.arguments, tensors)
            untrained = (k for k, trained in enumerate(call.trained) if not trained)
            custom = CustomOp(function=call.op, untrained=frozenset(untrained))
        op = RawOp(
            target,
            tuple(map(self._arg, args)),
            tuple((k, self._arg(v)) for k, v in kwargs.items() if k != "pin_memory"),
            tuple(k for k in keys if isinstance(k, str)),
            module_stack(node),
            source_line(node),
            custom,
        )
        self.program.ops.append(op)
        return tuple(keys)

    def _arg(self, value: Any) -> RawArg:
        if isinstance(value, fx.Node):
            key = self.keys[value][0]
            assert key is not None, value
            return Operand(key)
        if isinstance(value, (tuple, list)):
            return tuple(map(self._arg, value))
        if isinstance(value, _SYMBOLS):
            return symbol(value)
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise CaptureError(f"an argument of type {type(value).__name__} cannot be kept: {value}")

    def _read_outputs(self, node: fx.Node) -> None:
        names = iter(self.exported.chosen.tensors)
        values: tuple[Any, ...] = node.args
        specs = self.exported.program.graph_signature.output_specs
        writes = (self._written(spec) for spec in specs if spec.kind in STATE_WRITES)
        expect_writes(writes, self.names.parameters)
        for spec, value in zip(specs, values[0], strict=True):
            key = self.keys[value][0]
            assert key is not None
            if spec.kind in STATE_WRITES and is_state(written := self._written(spec)):
                self.program.mutations.append((written.name, key))
            elif spec.kind is OutputKind.USER_OUTPUT:
                name = next(names, None)
                if name is not None:
                    self.program.outputs.append((name, key))
                else:  # it keeps bodies of calls alive
                    self.program.marked.append(key)
            elif not is_clamped(spec, value):
                refuse_write(self._named(str(spec.target)), source_line(value))

    def _written(self, spec: OutputSpec) -> Source:
        """What a call of the model writes to. Raises CaptureError for what is not of the model."""
        target = str(spec.target).removeprefix(MODEL + ".")
        if target not in self.names.sources:
            raise CaptureError("the model writes to what an earlier call has left")
        return self.names.sources[target]

    def _named(self, target: str) -> str:
        """The user's name of a parameter or an input of the exported program."""
        spec = self.specs.get(target)
        if spec is None or spec.kind is not InputKind.USER_INPUT:
            return target.removeprefix(MODEL + ".")
        tensors = [s.arg.name for s in self.specs.values() if s.kind is InputKind.USER_INPUT]
        return f"the input {self.infos[tensors.index(target)].name}"


def refuse_mutation(node: fx.Node) -> None:
    """Refuses an op of the user's that changes its arguments: torch writes a call around it."""
    if str(node.target).startswith("auto_functionalized"):
        name = str(node.args[0])
        raise CaptureError(
            f"{name} changes an argument in place; let it return a new tensor (mutates_args=())",
            op=name,
            source=source_line(node),
        )


def tensor_value(result: object, node: fx.Node) -> Value:
    if not isinstance(result, torch.Tensor):
        raise CaptureError(
            f"{node.target} returns a {type(result).__name__} where the graph can hold tensors "
            "only; keep it a tensor",
            op=str(node.target),
            source=source_line(node),
        )
    dtype = dtype_name(result.dtype)
    if dtype not in ITEM_BYTES:
        raise CaptureError(
            f"{node.target} makes or takes {dtype}, which no plan shards or adds up; keep it in "
            "bfloat16 or wider (of torchao or transformer_engine, turn float8 off)",
            op=str(node.target),
            source=source_line(node),
        )
    return Value(tuple(result.shape), dtype)


def constant_name(tensor: torch.Tensor) -> str:
    """A name computed from the value: equal constants get one name, in every layer and every
    run."""
    data = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{data.dtype}{tuple(data.shape)}".encode())
    digest.update(bytes(data.flatten().view(torch.uint8).tolist()))
    return f"constant_{digest.hexdigest()[:16]}"


def module_stack(node: fx.Node) -> tuple[str, ...]:
    """Scopes of the modules whose call made this op, outermost first, without the wrapper's. The
    second call of a module has "@1" behind it, the third "@2"."""
    stack = []
    for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
        if path.startswith(MODEL + "."):
            _, at, count = key.rpartition("@")
            stack.append(path.removeprefix(MODEL + ".") + (at + count if at else ""))
    return tuple(stack)


def source_line(node: fx.Node) -> str:
    """ "file:line" of the user's code, "" if unknown."""
    return str((node.meta.get("custom") or {}).get(SOURCE, ""))


def _is_assert(node: fx.Node) -> bool:
    return str(node.target).startswith("aten._assert")


def unchanged_operand(node: fx.Node) -> fx.Node | None:
    """The operand that this op returns unchanged, None if it changes something."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not isinstance(source.meta.get("val"), torch.Tensor):
        return None
    if node.target is _aten.native_dropout.default:
        _, p, train = node.args
        drops = p != 0 and train is not False
        mask_is_read = any(user.args[1] == 1 for user in node.users)
        return None if drops or mask_is_read else source
    before, after = source.meta["val"], node.meta["val"]
    if node.target in _SAME_IF_SAME_SHAPE:
        return source if before.shape == after.shape else None
    if node.target is _aten.type_as.default:
        return source if before.dtype == after.dtype else None
    if node.target is _aten.copy.default and not _is_written(node):
        copied: Any = node.args[1]
        taken = copied.meta["val"]
        return copied if (taken.shape, taken.dtype) == (after.shape, after.dtype) else None
    if node.target is _aten._to_copy.default and "memory_format" not in node.kwargs:
        return source if before.dtype == after.dtype else None
    return None


def settled(node: fx.Node) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """(op, arguments, keyword arguments) of a call as the graph keeps them. -1 sizes and open or
    negative slice bounds become numbers, and four kinds of ops become others:

    views      reshape: whether a view is possible depends on strides, and a kernel need not give
               the strides that its fake promised
    type_as    a cast: of its second operand only the dtype counts
    copy       of its first operand only shape and dtype count: a cast or an expansion of the second
               (copy has no derivative)
    new_zeros  and the like: a constant, which reads nothing of what it is called on
    """
    target, args, kwargs = str(node.target), tuple(node.args), dict(node.kwargs)
    target = OTHER_NAMES.get(target, target)
    result = node.meta["val"]
    if node.target is _aten.type_as.default:
        return CAST, args[:1], {"dtype": result.dtype}
    if node.target is _aten.copy.default and not _is_written(node):
        source: Any = args[1]
        if source.meta["val"].shape == result.shape:
            return CAST, (source,), {"dtype": result.dtype}
        if source.meta["val"].dtype == result.dtype:
            return "aten.expand.default", (source, tuple(result.shape)), {}
    if node.target in _FRESH:
        filled = _FRESH[node.target]
        number = args[2] if filled is None else filled
        device = torch.device("cpu")  # stands for the rank's
        return FULL, (tuple(result.shape), number), {"dtype": result.dtype, "device": device}
    if node.target in _SIZED:
        name = "aten.reshape.default" if node.target in _VIEWS else target
        return name, (args[0], tuple(result.shape), *args[2:]), kwargs
    if node.target is _aten.slice.Tensor:
        return target, _slice_arguments(args), kwargs
    return target, args, kwargs


def _slice_arguments(given: tuple[Any, ...]) -> tuple[Any, ...]:
    defaults: tuple[Any, ...] = (None, 0, None, None, 1)
    source, dim, start, end, step = (*given, *defaults[len(given) :])
    shape = source.meta["val"].shape
    start, end, step = slice(start, end, step).indices(shape[dim])
    return source, dim % len(shape), start, end, step


def _is_written(node: fx.Node) -> bool:
    """Whether the result leaves the graph: a buffer that takes it needs a tensor of its own."""
    return any(user.op == "output" for user in node.users)
