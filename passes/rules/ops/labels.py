"""What an op rule is made of: labels on the dims of operands and outputs.

A rule function looks at one op and labels every dim, like the letters of an einsum:

    linear    x[b, s, k], weight[o, k], bias[o] -> [b, s, o]     k is summed, bias is added
    softmax   x[b, h, s, .] -> [b, h, s, .]                       '.' has no label: needed unsharded

Sharding a label on one axis shards every dim that carries it; passes.rules derives the axis rules.

A label may be spread over several dims, each a digit of one index: a view [B, S, D] -> [B * S, D]
gives B and S one label. A DimLabel (label, prefix) says that the dim begins after a factor `prefix`
of that index. A shard of the label divides the index into blocks, and that of a dim is
Shard(dim, blocks / prefix). Ordinary labels have prefix 1.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from meshfold.ir.op_graph import Arg, Op, OpGraph, Ref, Value
from meshfold.ir.spmd import SpmdType

DimLabel = tuple[str, int]
Dims = tuple[DimLabel | None, ...]
"""One entry per dim of a tensor; None: the dim is needed unsharded."""


SHIFT = "shift"
"""The collective that passes something on to the next rank, over and over inside an op."""


@dataclass(frozen=True, slots=True)
class RuleComm:
    """A collective inside an op, in its forward or its backward."""

    collective: str
    num_bytes: int
    """Local payload, before other axes divide it."""
    is_backward: bool = False
    is_undivided: bool = False
    """Whether num_bytes is before its own axis divides it, too."""
    is_asynchronous: bool = False
    """Whether other ops may run between its start and its wait."""
    is_saved: bool = False
    """Whether a second run of the forward reads what the first got."""


@dataclass(frozen=True, slots=True)
class Special:
    """What sharding a label means beyond the types of its dims."""

    output: SpmdType | None = None
    """Type of the outputs, where it follows neither from their dims nor from a sum."""
    local: str = "plain"
    """Name of the local implementation (meshfold.ops.local_implementations)."""
    comm: tuple[RuleComm, ...] = ()
    """Collectives inside."""
    load: float = 1.0
    """Work of the busiest rank over the mean."""


@dataclass(frozen=True)
class OpLabels:
    """Labels of one op. Padded shards are those of labels that do not divide
    (meshfold.ir.spmd)."""

    inputs: tuple[Dims, ...]
    """Dim labels of each operand, in the order of op.operands."""
    outputs: tuple[Dims, ...]
    summed: frozenset[str] = frozenset()
    """Labels that disappear by summation, so that outputs become Partial."""
    added: frozenset[int] = frozenset()
    """Operands that are added to such a sum: Partial when a summed label is sharded."""
    linear: tuple[frozenset[int], ...] = ()
    """Sets of operands that may be Partial together, all others being the same everywhere."""
    special: Mapping[str, Special] = field(default_factory=dict)
    unsharded_if_uneven: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Label -> operands that stay unsharded, as if they did not carry it, where their dim does not
    divide."""
    granularity: Mapping[str, int] = field(default_factory=dict)
    """Label -> number of equal groups that no shard splits, as groups of channels."""
    pads: frozenset[str] = frozenset()
    """Labels that the op may pad: it never looks at padding rows and gives them no gradient."""
    heads: frozenset[str] = frozenset()
    """Labels whose padding the op keeps, and asks for."""
    keeps_padding: frozenset[str] = frozenset()
    """Labels whose padding rows the op computes finite numbers of from finite ones, and no gradient
    from none."""
    drops_padding: frozenset[str] = frozenset()
    """Labels of which the local op runs on the valid rows of a rank."""
    refinements: Mapping[str, tuple[str, tuple[Dims, ...]]] = field(default_factory=dict)
    """Label -> another label and Dims of operands and outputs, where it shards more than that one
    does, in the same blocks (passes.rules.table.refined_rules)."""
    alternatives: Mapping[str, tuple[Dims, ...]] = field(default_factory=dict)
    """An extra label -> Dims of operands and outputs, for another way to share the op."""
    local: str = "plain"
    """Local implementation under every rule."""
    takes_summands: bool = True
    """Whether ranks may hold summands of the results' gradients, as they may where the backward is
    linear in them: it is in every op of torch."""

    @property
    def names(self) -> tuple[str, ...]:
        """Labels in order of first appearance."""
        found = {p[0]: None for dims in (*self.inputs, *self.outputs) for p in dims if p}
        return tuple(found)

    def dims_of(self, label: str) -> tuple[Dims, ...]:
        """Dims of operands, then outputs, as the rule of a label has them."""
        if label in self.alternatives:
            return self.alternatives[label]
        refined = self.refinements.get(label)
        return refined[1] if refined else (*self.inputs, *self.outputs)


class BoundOp:
    """One op with its arguments by name, as rule functions read it.

    values, outputs: operands and results in op order.
    """

    def __init__(self, graph: OpGraph, op: Op, arguments: Mapping[str, Arg]) -> None:
        self.target = op.target
        self.operands = op.operands
        self.values = tuple(graph.values[v] for v in op.operands)
        self.outputs = tuple(graph.values[v] for v in op.outputs)
        self._arguments = arguments
        self._positions: dict[str, tuple[int, ...]] = {}
        first = 0
        for name, argument in arguments.items():
            count = _num_refs(argument)
            self._positions[name] = tuple(range(first, first + count))
            first += count

    def get(self, name: str, default: Arg = None) -> Arg:
        """The argument, or `default` if it was not given."""
        return self._arguments.get(name, default)

    def positions(self, name: str) -> tuple[int, ...]:
        """Operand positions of the tensors in an argument."""
        return self._positions.get(name, ())

    def position(self, name: str) -> int:
        """Operand position of a tensor argument."""
        (position,) = self.positions(name)
        return position

    def has_tensor(self, name: str) -> bool:
        return bool(self.positions(name))

    def value(self, name: str) -> Value:
        return self.values[self.position(name)]

    def integer(self, name: str, default: int = 0) -> int:
        found = self.get(name, default)
        assert isinstance(found, int), f"{self.target}: {name} is {found!r}"
        return found

    def integers(self, name: str) -> tuple[int, ...]:
        """A list argument; a single number is a list of one."""
        found = self.get(name, ())
        items = found if isinstance(found, tuple) else (found,)
        return tuple(i for i in items if isinstance(i, int))

    def dim(self, name: str, rank: int, default: int = 0) -> int:
        """A dim argument, counted from the front."""
        return self.integer(name, default) % max(rank, 1)


def _num_refs(argument: Arg) -> int:
    if isinstance(argument, tuple):
        return sum(map(_num_refs, argument))
    return int(isinstance(argument, Ref))


LabelFunction = Callable[[BoundOp], OpLabels | None]


@dataclass(frozen=True, slots=True)
class OpRule:
    """Row of the rule table. parameters: every argument of the op that the function has thought
    of, in schema order; an op called with any other has no rule."""

    parameters: tuple[str, ...]
    labels: LabelFunction


def rule(parameters: str, labels: LabelFunction) -> OpRule:
    """A row; `parameters` are separated by spaces."""
    return OpRule(tuple(parameters.split()), labels)


def bind(graph: OpGraph, op: Op, parameters: Sequence[str]) -> BoundOp | None:
    """Arguments by name, in op order; None if one has no name in `parameters`."""
    keywords = dict(op.kwargs)
    if len(op.args) > len(parameters) or not keywords.keys() <= set(parameters):
        return None
    return BoundOp(graph, op, {**dict(zip(parameters, op.args, strict=False)), **keywords})


def dim_label(label: str, prefix: int = 1) -> DimLabel:
    return (label, prefix)


def numbered(shape: Sequence[int], but: Sequence[int] = ()) -> Dims:
    """Labels d0, d1, ... for every dim, none for the dims in `but`."""
    return tuple(None if d in but else dim_label(f"d{d}") for d in range(len(shape)))


def broadcast_dims(shape: Sequence[int], full: Sequence[int], labels: Dims) -> Dims:
    """Dims of an operand that is broadcast to `full`, whose dims are `labels`."""
    offset = len(full) - len(shape)
    return tuple(
        labels[offset + d] if size == full[offset + d] else None for d, size in enumerate(shape)
    )
