"""The op graph and its folded form: what capture makes and everything else reads. No torch here.

OpGraph      a straight-line program over numbered values. Values 0..len(slots)-1 are the slots
             (what comes from outside); every op adds its outputs.
Region       an OpGraph that occurs once or more, relative to its scope.
Instance     one occurrence: where each slot of the region comes from, and its floats.
FoldedGraph  instances in execution order, plus tables of parameters, buffers, inputs, outputs.

The forward graph is all there is: the backward follows from SPMD types.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

from meshfold.ir.custom_ops import CustomOp
from meshfold.ir.returns import Returns


@dataclass(frozen=True, slots=True)
class Ref:
    """An operand: value `index` of the enclosing OpGraph."""

    index: int


@dataclass(frozen=True, slots=True)
class Hole:
    """A float constant bound per instance: `Instance.floats[index]`."""

    index: int


@dataclass(frozen=True, slots=True)
class Symbol:
    """A torch object by name: kind "dtype" (text "float32"), "device", "layout",
    "memory_format"; or a number of kind "complex" (text "1j"). Device symbols always mean "the
    rank's device". In the graph of a microbatch also numbers that are known when it runs: kind
    "microbatch", which one it is, and "count", the targets of the step that the loss with op number
    `text` divides by."""

    kind: str
    text: str


Arg = Ref | Hole | Symbol | int | float | bool | str | None | tuple["Arg", ...]


class Dependence(StrEnum):
    """What a value depends on; the strongest wins (BATCH > PARAMETER > CONSTANT). Random numbers
    are BATCH."""

    CONSTANT = "constant"
    PARAMETER = "parameter"
    BATCH = "batch"


ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes of one element, by dtype name."""


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the graph: global shape, dtype name ("float32"), whether a gradient flows.
    master: of a parameter that ops read in `dtype`, the dtype in which it is stored between steps
    and its gradient is reduced, where that is another one; else empty."""

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool = False
    depends: Dependence = Dependence.BATCH
    master: str = ""

    @property
    def is_float(self) -> bool:
        """Whether a gradient can flow through its numbers, complex ones, too."""
        return self.dtype.startswith(("float", "bfloat", "complex"))

    @property
    def num_bytes(self) -> int:
        """Bytes of the unsharded tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def stored_dtype(self) -> str:
        """The dtype between steps."""
        return self.master or self.dtype


class SlotKind(StrEnum):
    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    VALUE = "value"


@dataclass(frozen=True, slots=True)
class Slot:
    """What a region takes from outside. `name` is relative to the region's scope for its own
    parameters and buffers ("self_attn.q_proj.weight"), a plain label otherwise."""

    kind: SlotKind
    name: str = ""


@dataclass(frozen=True)
class Draw:
    """What a random op draws for one microbatch: a slice of what the op draws for the full
    batch."""

    number: int
    """The op's number in the graph of the full batch."""
    dim: int = 0
    """The dim of it that is split into microbatches."""
    blocks: int = 1
    """Equal blocks of that dim, each of which is split."""
    microbatches: int = 1


UNIFORM, NORMAL = "meshfold.uniform.default", "meshfold.normal.default"
DRAWS = frozenset({UNIFORM, NORMAL})
"""Targets of the ops that make a tensor of random numbers. They read nothing: what they make
changes with every step, as the batch does."""


@dataclass(frozen=True)
class Op:
    """One call. `target` is "aten.linear.default"; `outputs` are value indices, one per tensor
    the op returns (a list result is flattened, getitem is folded away). `scope` is the module path
    relative to the region and `source` "file:line": both for messages only, never compared. draw:
    of a random op in the graph of a microbatch; without it the op draws as its position says.
    custom: what is known of an op that the user's code defines."""

    target: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    outputs: tuple[int, ...]
    scope: str = field(default="", compare=False)
    source: str = field(default="", compare=False)
    draw: Draw | None = None
    custom: CustomOp | None = None

    @cached_property
    def operands(self) -> tuple[int, ...]:
        """Value indices read, in argument order, repeats included."""
        return tuple(r.index for a in (*self.args, *(v for _, v in self.kwargs)) for r in _refs(a))

    def on_values(self, operands: Iterable[int], outputs: Iterable[int]) -> "Op":
        """The same op that reads other values, in the order of `operands`, and makes others."""
        read = iter(operands)
        args = tuple(_rebound(a, read) for a in self.args)
        kwargs = tuple((name, _rebound(a, read)) for name, a in self.kwargs)
        return replace(self, args=args, kwargs=kwargs, outputs=tuple(outputs))

    def renumbered(self, number: Mapping[int, int]) -> "Op":
        """The same op in a graph whose values have other numbers."""
        return self.on_values((number[v] for v in self.operands), (number[v] for v in self.outputs))


def _rebound(arg: Arg, read: Iterator[int]) -> Arg:
    if isinstance(arg, Ref):
        return Ref(next(read))
    return tuple(_rebound(a, read) for a in arg) if isinstance(arg, tuple) else arg


def _refs(arg: Arg) -> Iterator[Ref]:
    if isinstance(arg, Ref):
        yield arg
    elif isinstance(arg, tuple):
        for a in arg:
            yield from _refs(a)


@dataclass(frozen=True)
class OpGraph:
    """slots[i] describes value i; ops are in execution order; `outputs` are the values that live
    on outside, in a fixed order. `mutations` are (slot index, value index): after a run the buffer
    of that slot takes that value."""

    slots: tuple[Slot, ...]
    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    outputs: tuple[int, ...]
    mutations: tuple[tuple[int, int], ...] = ()

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """The indices of the ops that read each value, ascending, without repeats."""
        out: list[list[int]] = [[] for _ in self.values]
        for k, op in enumerate(self.ops):
            for v in dict.fromkeys(op.operands):
                out[v].append(k)
        return tuple(map(tuple, out))

    @cached_property
    def producers(self) -> tuple[int, ...]:
        """The index of the op that computes each value, -1 for a slot."""
        out = [-1] * len(self.values)
        for k, op in enumerate(self.ops):
            for v in op.outputs:
                out[v] = k
        return tuple(out)


@dataclass(frozen=True)
class Region:
    """A repeated subgraph. `name` is "A", "B", ... in order of first occurrence."""

    name: str
    graph: OpGraph


class SourceKind(StrEnum):
    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    INPUT = "input"
    VALUE = "value"
    BOUNDARY = "boundary"


@dataclass(frozen=True, slots=True)
class ParameterSlice:
    """Slice `number` of `count` equal ones along dim `dim` of a parameter."""

    dim: int
    number: int
    count: int


@dataclass(frozen=True, slots=True)
class Source:
    """Where a slot's value comes from. PARAMETER, BUFFER, CONSTANT, INPUT: `name` is the canonical
    full name. VALUE: output number `output` of instance number `instance`. BOUNDARY, in a pipeline
    stage: what the stage before hands over, see passes/split/stage_graphs.py. slice: of a parameter
    that is read in slices (passes/split/operator_slices.py)."""

    kind: SourceKind
    name: str = ""
    instance: int = -1
    output: int = -1
    slice: ParameterSlice | None = None

    @property
    def label(self) -> str:
        """What is read, by name: slices of a parameter have names of their own."""
        return f"{self.name}[{self.slice.number}/{self.slice.count}]" if self.slice else self.name


@dataclass(frozen=True)
class Instance:
    """One occurrence of region number `region`. `sources[i]` feeds slot i."""

    region: int
    scope: str
    sources: tuple[Source, ...]
    floats: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ParameterInfo:
    """A distinct parameter, in the dtype in which it is stored. `name` is its first name, `aliases`
    every further name (tied). `used` is False for a parameter that no op reads."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool = True
    aliases: tuple[str, ...] = ()
    used: bool = True


@dataclass(frozen=True, slots=True)
class BufferInfo:
    name: str
    shape: tuple[int, ...]
    dtype: str
    persistent: bool
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class InputInfo:
    """A tensor input. `name` is its path in the keyword arguments ("input_ids").
    is_differentiated: whether forward takes gradients of it, so that it may require one."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    is_differentiated: bool = field(default=False, repr=False)


@dataclass(frozen=True, slots=True)
class OutputInfo:
    """An output of the model: `name` its path in what the model returns ("loss"; "" for a bare
    tensor), `source` where it is computed."""

    name: str
    source: Source
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class FoldedGraph:
    """The folded program: instances in execution order. Also the flat one: a single region."""

    regions: tuple[Region, ...]
    instances: tuple[Instance, ...]
    parameters: tuple[ParameterInfo, ...]
    buffers: tuple[BufferInfo, ...]
    inputs: tuple[InputInfo, ...]
    outputs: tuple[OutputInfo, ...]
    notes: tuple[str, ...] = ()
    """What the user should know: refusals with their reason, unused parameters, branches."""
    returns: Returns = Returns()
    """What of the model's return value `outputs` are."""
    numbers: tuple[int, ...] = ()
    """Per instance that of the captured program of which it is a part: random ops draw by it. Empty
    where each is its own."""

    @property
    def apart(self) -> tuple[OutputInfo, ...]:
        """The outputs that were asked for besides the loss: copies, which no layer reads."""
        if not self.returns.outputs:
            return ()
        return self.outputs[int(self.returns.has_loss) :]

    @property
    def batch_size(self) -> int:
        """Size of dim 0 that most inputs share: the global batch. 0 where no input has a dim."""
        sizes = [info.shape[0] for info in self.inputs if info.shape]
        return max(sizes, key=lambda n: (sizes.count(n), n), default=0)

    @cached_property
    def runs(self) -> tuple[tuple[int, int, int], ...]:
        """Maximal runs of one region: (region, first instance, count)."""
        out: list[tuple[int, int, int]] = []
        for k, inst in enumerate(self.instances):
            if out and out[-1][0] == inst.region:
                out[-1] = (inst.region, out[-1][1], out[-1][2] + 1)
            else:
                out.append((inst.region, k, 1))
        return tuple(out)

    @cached_property
    def first_floats(self) -> Mapping[int, tuple[float, ...]]:
        """By region, the bindings of its first instance."""
        return {i.region: i.floats for i in reversed(self.instances)}

    @cached_property
    def tied_slots(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Groups of parameter slots (region, slot) that share a parameter, for some instance, and
        so its stored layout; only groups of two and more, in order of first appearance."""
        group_of: dict[tuple[int, int], list[tuple[int, int]]] = {}
        of_name: dict[str, tuple[int, int]] = {}
        for instance in self.instances:
            for i, source in enumerate(instance.sources):
                if source.kind is not SourceKind.PARAMETER:
                    continue
                slot = instance.region, i
                group = group_of.setdefault(slot, [slot])
                other = group_of[of_name.setdefault(source.name, slot)]
                if other is not group:
                    other += group
                    group_of.update(dict.fromkeys(group, other))
        place = {slot: k for k, slot in enumerate(group_of)}
        groups = {id(group): group for group in group_of.values()}.values()
        return tuple(tuple(sorted(g, key=place.__getitem__)) for g in groups if len(g) > 1)

    @property
    def num_ops(self) -> int:
        return sum(len(self.regions[i.region].graph.ops) for i in self.instances)
