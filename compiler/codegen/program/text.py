"""Emitted programs as text: what `meshfold graph` prints, and what the program's digest covers."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from meshfold.ir.mesh import Mesh
from meshfold.ir.node_groups import NodeLevels
from meshfold.ir.spmd import layout_text
from meshfold.ir.strategy import KeptResults, Recompute
from meshfold.zero.parameter_group import ParameterGroup

TYPE = "meshfold_type"
"""Key of fx.Node.meta: text of the value's layout, dtype and local shape."""


def rank_text(
    levels: NodeLevels, rank: int, axis_sets: tuple[tuple[str, ...], ...]
) -> Iterator[str]:
    """Who `rank` is and whom it talks to. Raises ValueError if the mesh has no such rank."""
    mesh = levels.mesh
    coords = mesh.coords(rank)
    place = ", ".join(f"{name} {c}" for name, c in zip(mesh.names, coords, strict=True))
    yield f"rank {rank} of {mesh.num_ranks} ({place or 'alone'}) on {mesh}"
    for axes in axis_sets:
        among, names = levels.resolved(axes)
        ranks = group_of(among, among.coords(rank), names)
        shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        yield f"  group {' x '.join(axes)}: {len(ranks)} ranks {shown}"


def group_of(mesh: Mesh, coords: tuple[int, ...], axes: tuple[str, ...]) -> list[int]:
    """The ranks that differ from `coords` on `axes` only, in mesh order."""
    ranks = [0]
    for axis, c in zip(mesh.axes, coords, strict=True):
        choices = range(axis.size) if axis.name in axes else (c,)
        ranks = [r * axis.size + x for r in ranks for x in choices]
    return ranks


def recomputation_text(recompute: Recompute, kept: KeptResults) -> str:
    """What of a region runs again, behind its name."""
    if recompute == "none":
        return ""
    if recompute == "full":
        return "; runs again in backward"
    ops = " ".join(map(str, kept.ops)) or "none"
    values = " ".join(f"{v}:{layout_text(layout)}" for v, layout in kept.conversions)
    converted = f", converted values {values}" if values else ""
    return f"; runs again in backward but for ops {ops}{converted}"


def group_text(number: int, group: ParameterGroup, mesh: Mesh) -> Iterator[str]:
    """What is gathered and reduced together."""
    names = [mesh.names[k] for k in group.gather]
    if group.gather:
        axes = " x ".join(names)
        backward = f"reduce-scatter {axes}"
        if group.replicas:
            backward += f", all-reduce {' x '.join(mesh.names[k] for k in group.replicas)}"
        head = f"all-gather {axes}"
    else:
        reduce = " x ".join(mesh.names[k] for k in group.reduce)
        backward = f"all-reduce {reduce}" if reduce else "cast"
        head = "cast" if group.master else "no gather"
    if not group.requires_grad:
        backward = "-"
    kept = f", kept and reduced in {group.master}" if group.master else ""
    yield f"group_{number}: {head}; backward {backward}; {group.dtype}{kept}"
    for m in group.members:
        shape = ", ".join(map(str, m.shape))
        then = ""
        late = [mesh.names[k] for k in m.reduce if k not in group.replicas]
        if group.gather and late and group.requires_grad:
            then = f", then all-reduce {' x '.join(late)}"
        yield f"  {m.name} [{shape}]: {layout_text(m.stored)} -> {layout_text(m.used)}{then}"


def graph_lines(graph: fx.Graph) -> Iterator[str]:
    """One line per node: name = op(arguments)  # layout dtype[local shape]."""
    placeholders = [_typed(n.name, n) for n in graph.nodes if n.op == "placeholder"]
    yield f"graph({', '.join(n for n, _ in placeholders)})"
    for name, kind in placeholders:
        if kind:
            yield f"  {name}  # {kind}"
    for node in graph.nodes:
        if node.op == "call_function":
            args = [_arg(a) for a in node.args]
            args += [f"{k}={_arg(v)}" for k, v in node.kwargs.items()]
            name, kind = _typed(node.name, node)
            line = f"  {name} = {target_name(node.target)}({', '.join(args)})"
            yield f"{line}  # {kind}" if kind else line
        elif node.op == "output":
            yield f"  return {_arg(node.args[0])}"


def target_name(target: str | Callable[..., Any]) -> str:
    """ "aten.linear" for a torch op, the function's own name otherwise."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target).removesuffix(".default")
    return target if isinstance(target, str) else target.__name__


def _typed(name: str, node: fx.Node) -> tuple[str, str]:
    return name, node.meta.get(TYPE, "")


def _arg(arg: Any) -> str:
    if isinstance(arg, fx.Node):
        return arg.name
    if isinstance(arg, (tuple, list)):
        return f"({', '.join(map(_arg, arg))}{',' if len(arg) == 1 else ''})"
    return str(arg)
