"""Selective recomputation of a region: what is kept of its graph stays, the backward makes the rest
from it.

    forward    run node by node; of every tensor that autograd wants to save
                   on the storage of what arrived, of a parameter or of a kept result   it is saved
                   on the storage of another operand                  the operand's name instead
                   made inside the op, of an op that is kept          it is saved
                   made inside an op that is not                      its number instead
    backward   at the first name or number that comes back: run the nodes that lead to all of them,
               from what arrived and kept results, in their order; return each tensor once

What is kept is said by the plan (RegionTyping.kept); what of it is needed, and what runs again,
follows from what autograd saved. The nodes that run again do as they did: every rank runs the same
ones at the same place, dropout draws from the same (seed, step, site), counts that ranks exchanged
are replayed. Results on the storage of something kept, views of it, are kept with it.

As with full recomputation (meshfold.runtime.recomputation), the second run's own graph of autograd
is dropped unused and starts no gathers ahead.
"""

import contextlib
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from meshfold.codegen.program.emitted import (
    CONTEXT,
    INSTANCE,
    NAME,
    ORIGIN,
    RegionInstance,
    RegionProgram,
    group_number,
)
from meshfold.distributed.replayed_counts import RecordedCounts, ReplayedCounts
from meshfold.distributed.step_context import StepContext
from meshfold.errors import MeshfoldError
from meshfold.passes.memory.local_program import is_kept
from meshfold.runtime.recomputation import CHANGED, Rerun
from meshfold.zero.graph_ops import replicate_group, wait_group
from meshfold.zero.step import TrainingStep

Saved = Tensor | Callable[[], Tensor]
"""What autograd saves of a tensor: it, or what gives it."""

_GROUPS = (wait_group, replicate_group)


@dataclass(frozen=True, eq=False)
class Steps:
    """A graph of functions, ready to run node by node: names of its inputs, nodes with the values
    that nobody reads after them, and what it returns."""

    inputs: tuple[str, ...]
    nodes: tuple[tuple[fx.Node, tuple[str, ...]], ...]
    output: Any


@dataclass(frozen=True, eq=False)
class SecondRun:
    """Names of the nodes that run again, of what they read and, by name, of the values that none of
    them reads after it; numbers of the parameter groups that they read."""

    names: frozenset[str]
    reads: frozenset[str]
    dead: Mapping[str, Sequence[str]]
    groups: tuple[int, ...]


class SelectiveRegion:
    """What the plan says about the nodes of a region's graph, by their names; its segments have the
    same. Made once for all steps."""

    def __init__(self, region: RegionProgram) -> None:
        self.placeholders = tuple(n.name for n in region.graph.graph.nodes if n.op == "placeholder")
        self.nodes = tuple(n for n in region.graph.graph.nodes if n.op == "call_function")
        kept = region.typing.kept
        self.kept = frozenset(
            n.name for n in self.nodes if ORIGIN in n.meta and is_kept(n.meta[ORIGIN], kept)
        )
        """The nodes that run once."""
        readers = {n.name: {u.name for u in n.users if u.op != "output"} for n in self.nodes}
        self.read_again = frozenset(k for k in self.kept if not readers[k] <= self.kept)
        """Those whose results a second run may read."""
        groups = {
            n.name: group_number(n.all_input_nodes[0].name)
            for n in self.nodes
            if n.target in _GROUPS
        }
        self.groups = groups
        """The nodes that open a parameter group, and its number."""
        self.members = frozenset(
            n.name for n in self.nodes if n.target is operator.getitem and str(n.args[0]) in groups
        )
        """The nodes that take parameters out of one."""
        self._names = frozenset(n.name for n in self.nodes)
        self._steps: dict[fx.Graph, Steps] = {}
        self._second_runs: dict[frozenset[str], SecondRun] = {}

    def steps(self, graph: fx.Graph) -> Steps:
        """The region's graph, or that of one of its segments."""
        if graph not in self._steps:
            self._steps[graph] = steps = _steps(graph)
            assert self._names.issuperset(name_of(n) for n, _ in steps.nodes)
        return self._steps[graph]

    def second_run(self, wanted: frozenset[str]) -> SecondRun:
        """What leads to the results of these nodes."""
        if wanted not in self._second_runs:
            needed = set(wanted)
            names, read, dead = set(), set(wanted), {}
            for node in reversed(self.nodes):
                if node.name not in needed or node.name in self.kept:
                    continue
                names.add(node.name)
                inputs = {n.name for n in node.all_input_nodes}
                dead[node.name] = sorted(inputs - read)
                read |= inputs
                needed |= inputs
            groups = tuple(sorted({self.groups[k] for k in names & self.groups.keys()}))
            second = SecondRun(frozenset(names), frozenset(needed), dead, groups)
            self._second_runs[wanted] = second
        return self._second_runs[wanted]


def _steps(graph: fx.Graph) -> Steps:
    inputs, nodes = [], []
    read: set[str] = set()
    output: Any = None
    for node in reversed(graph.nodes):
        if node.op == "placeholder":
            inputs.append(name_of(node))
            continue
        if node.op == "output":
            output = node.args[0]
        else:
            assert node.op == "call_function", "regions are emitted as functions"
            dead = {name_of(n) for n in node.all_input_nodes} - read
            if name_of(node) not in read:
                dead.add(name_of(node))
            nodes.append((node, tuple(sorted(dead))))
        read |= {name_of(n) for n in node.all_input_nodes}
    return Steps(tuple(reversed(inputs)), tuple(reversed(nodes)), output)


def name_of(node: fx.Node) -> str:
    """A node's name in the region's graph."""
    return str(node.meta.get(NAME, node.name))


class SelectiveRecomputation:
    """One instance of a region with selective recomputation, during one step. Nothing here may
    refer to autograd's graph, which refers to this."""

    def __init__(
        self,
        step: TrainingStep,
        instance: RegionInstance,
        region: SelectiveRegion,
    ) -> None:
        self._step = step
        self._instance = instance
        self._region = region
        self._rerun: Rerun | None = None
        self._counts: RecordedCounts | ReplayedCounts | None = None
        self._node: fx.Node | None = None
        """The node that runs, and the values that it reads."""
        self._values: Mapping[str, Any] = {}
        self._held = {*region.placeholders, *region.members}
        """Names of values on the storage of what arrived, of parameters and of kept results."""
        self._results: dict[str, Any] = {}
        """Kept results that the second run may read."""
        self._wanted: Counter[str] = Counter()
        """How often the backward wants results of nodes that run again, by name."""
        self._made: Counter[str] = Counter()
        """How many tensors made inside it, by name of the node."""
        self._second_run: SecondRun | None = None
        self._found: dict[str, Tensor] = {}
        self._found_inside: dict[tuple[str, int], Tensor] = {}

    # Forward.

    @contextlib.contextmanager
    def recording(self, arrived: Sequence[Tensor]) -> Iterator[StepContext]:
        """While open the region runs, from what arrived, by `run` and `note`. Gives the context to
        run it in."""
        self._rerun = Rerun(self._step.context, arrived)
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            self._counts = self._rerun.first.counts
            yield self._rerun.first
        wanted = frozenset(self._wanted) | frozenset(self._made)
        self._second_run = self._region.second_run(wanted)
        reads = self._second_run.reads
        self._results = {k: x for k, x in self._results.items() if k in reads}
        names = self._direct_names(len(arrived))
        self._rerun.drop([k for k, name in enumerate(names) if name not in reads])
        uses = self._step.uses[self._instance.index]
        for number in self._second_run.groups:
            uses[number].will_be_recomputed()

    def run(self, graph: fx.Graph, arguments: Sequence[Any]) -> Sequence[Any]:
        """What the region's graph, or that of a segment, returns."""
        steps = self._region.steps(graph)
        values: dict[str, Any] = dict(zip(steps.inputs, arguments, strict=True))
        self._values = values
        for node, dead in steps.nodes:
            name = name_of(node)
            values[name] = result = self._call(node, values)
            self.note(name, result, [name_of(n) for n in node.all_input_nodes])
            for key in dead:
                del values[key]
        results: Sequence[Any] = map_arg(steps.output, lambda n: values[name_of(n)])
        self._node, self._values = None, {}
        return results

    def note(self, name: str, result: Any, inputs: Sequence[str]) -> None:
        """Note the result of a node, while `values` have what it read."""
        region = self._region
        if name in region.kept:
            self._held.add(name)
            if name in region.read_again:
                self._results[name] = _detached(result)
        elif name not in self._held and self._is_view_of_held(result, inputs):
            self._held.add(name)

    def _is_view_of_held(self, result: Any, inputs: Sequence[str]) -> bool:
        held = [self._values.get(name) for name in inputs if name in self._held]
        storages = {_storage(x) for x in held if isinstance(x, Tensor)}
        several = [x for x in held if isinstance(x, (tuple, list))]
        storages.update(_storage(x) for of in several for x in of if isinstance(x, Tensor))
        made = result if isinstance(result, (tuple, list)) else [result]
        return any(isinstance(x, Tensor) and x.numel() and _storage(x) in storages for x in made)

    def _call(self, node: fx.Node, values: Mapping[str, Any]) -> Any:
        self._node, self._values = node, values
        args = map_arg(node.args, lambda n: values[name_of(n)])
        kwargs = map_arg(node.kwargs, lambda n: values[name_of(n)])
        if self._counts is not None:
            self._counts.node = name_of(node)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _operand(self, tensor: Tensor) -> str | None:
        """The first operand of the running node that a saved tensor is, or is a view of."""
        assert self._node is not None
        storage = _storage(tensor)
        for n in self._node.all_input_nodes:
            x = self._values.get(name_of(n))
            if isinstance(x, Tensor) and _storage(x) == storage and _is_alike(x, tensor):
                return name_of(n)
        return None

    def _pack(self, tensor: Tensor) -> Saved:
        node = self._node
        if node is None or not tensor.numel():
            return tensor.detach()
        name = self._operand(tensor)
        if name is not None and name in self._held:
            saved = self._step.saved(tensor)
            if not isinstance(saved, Tensor):
                return saved
            return partial(_unchanged, saved, saved._version)
        if name is not None:
            self._wanted[name] += 1
            place = tensor.size(), tensor.stride(), tensor.storage_offset()
            return partial(self._take, name, place)
        if name_of(node) in self._region.kept:
            # Detached, or an op that saves its own result would hold itself alive.
            return tensor.detach()
        inside = name_of(node), self._made[name_of(node)]
        self._made[name_of(node)] += 1
        return partial(self._take_inside, inside)

    # Backward.

    def _take(self, name: str, place: tuple[Any, Any, Any]) -> Tensor:
        self._run_again()
        self._wanted[name] -= 1
        found = self._found[name] if self._wanted[name] else self._found.pop(name)
        return found.as_strided(*place)

    def _take_inside(self, inside: tuple[str, int]) -> Tensor:
        self._run_again()
        return self._found_inside.pop(inside)

    def _run_again(self) -> None:
        """Make what the backward misses, once."""
        second, rerun = self._second_run, self._rerun
        if second is None:
            return
        assert rerun is not None, "autograd asks after the forward"
        self._second_run = None
        self._step.arrive(self._instance.index)
        hooks = torch.autograd.graph.saved_tensors_hooks(self._note_inside, _never)
        seen, self._made = self._made, Counter()
        with rerun.running() as context, hooks:
            self._counts = context.counts
            values = self._given(context, rerun.arrived)
            for node in self._region.nodes:
                if node.name not in second.names:
                    continue
                result: Any
                if node.name in self._region.groups:
                    result = self._parameters(self._region.groups[node.name])
                else:
                    result = self._call(node, values)
                values[node.name] = result
                if node.name in self._wanted:
                    self._found[node.name] = result.detach()
                for name in second.dead[node.name]:
                    values.pop(name, None)
        self._node, self._values, self._rerun, self._counts = None, {}, None, None
        again = {name: self._made[name] for name in seen}
        assert again == seen, "the second run differs from the first"

    def _given(self, context: StepContext, arrived: Sequence[Tensor]) -> dict[str, Any]:
        """What a second run starts from."""
        floats = self._instance.floats
        names = self._region.placeholders[len(self._region.placeholders) - len(floats) :]
        values: dict[str, Any] = {CONTEXT: context, INSTANCE: self._instance.number}
        values.update(zip(names, floats, strict=True))
        values.update(zip(self._direct_names(len(arrived)), arrived, strict=True))
        values.update(self._results)
        self._results = {}
        return values

    def _direct_names(self, count: int) -> Sequence[str]:
        """Names of what arrives: the placeholders in front of the floats."""
        end = len(self._region.placeholders) - len(self._instance.floats)
        return self._region.placeholders[end - count : end]

    def _parameters(self, group: int) -> list[Tensor]:
        use = self._step.uses[self._instance.index][group]
        return [x.detach().requires_grad_(use.token is not None) for x in use.members()]

    def _note_inside(self, tensor: Tensor) -> None:
        assert self._node is not None
        if not tensor.numel() or self._operand(tensor) is not None:
            return
        name = self._node.name
        self._found_inside[name, self._made[name]] = tensor.detach()
        self._made[name] += 1


def _unchanged(tensor: Tensor, version: int) -> Tensor:
    if tensor._version != version:
        raise MeshfoldError(CHANGED)
    return tensor


def _unpack(saved: Saved) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved()


def _never(_: Any) -> Tensor:
    raise AssertionError("the graph of a second run has no backward")


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_alike(x: Tensor, view: Tensor) -> bool:
    """Whether a view of x is told by its size, strides and offset."""
    return (x.dtype, x.is_conj(), x.is_neg()) == (view.dtype, view.is_conj(), view.is_neg())


def _detached(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result.detach().requires_grad_(result.requires_grad)
    if isinstance(result, (tuple, list)):
        return type(result)(map(_detached, result))
    return result
