"""Write everything that stops a gradient as a `detach` op, before run_decompositions.

run_decompositions silently drops no_grad blocks and `detach_`: the values would be right and the
gradients wrong. A no_grad block is inlined, with a `detach` on each float result. (Inlined also
because ops of a block otherwise lose the modules that called them.) `detach_` becomes `detach`,
and later readers of the same tensor read the detached one. A detached value that something with a
gradient is written into is a copy.
"""

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from meshfold.capture.gradients.parts import is_of_part
from meshfold.errors import CaptureError
from meshfold.torch_compat.autograd_functions import is_of_op
from meshfold.torch_compat.fake_tensors import is_fake
from meshfold.torch_compat.source_lines import definition, line_in

_BLOCK = "wrap_with_set_grad_enabled"
_IN_NO_GRAD = "meshfold_in_no_grad"
_DETACHES = (torch.ops.aten.detach.default, torch.ops.aten.detach_.default)


def write_detaches(module: fx.GraphModule) -> None:
    """Rewrite the graph of `module` in place. Raises CaptureError for what no `detach` can
    say: a tensor with a gradient changed in place inside no_grad."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and str(node.target) == _BLOCK:
            _inline_block(module, node)
    _part_written_detaches(graph)
    position = {node: k for k, node in enumerate(graph.nodes)}
    for node, here in position.items():
        if node.target is torch.ops.aten.detach_.default:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            detached = _detached(graph, source, node)
            node.replace_all_uses_with(detached)
            later = {user for user in source.users if position.get(user, -1) > here}
            source.replace_all_uses_with(detached, later.__contains__)
            graph.erase_node(node)


def _inline_block(module: fx.GraphModule, node: fx.Node) -> None:
    """Replace the call of a block by the ops of the block."""
    args: tuple[Any, ...] = node.args
    enables_gradient, getter, *operands = args
    block = module.get_submodule(str(getter.target))
    assert isinstance(block, fx.GraphModule)
    write_detaches(block)
    outer: dict[fx.Node, fx.Node] = {}
    results: Any = ()
    values = iter(operands)
    for inner in block.graph.nodes:
        if inner.op == "placeholder":
            outer[inner] = next(values)
        elif inner.op == "output":
            results = inner.args[0]
        else:
            if not enables_gradient:
                _refuse_change_of_outer_value(inner, outer)
            with module.graph.inserting_before(node):
                outer[inner] = module.graph.node_copy(inner, outer.__getitem__)
            if not enables_gradient:
                outer[inner].meta[_IN_NO_GRAD] = True
                _detach_what_is_written(module.graph, outer[inner])
    for item in list(node.users):
        result = _given_back(results[item.args[1]])
        value = outer[result]
        # A value that only passes through a block keeps its gradient.
        made_inside = result.op != "placeholder"
        if made_inside and not enables_gradient and item.meta["val"].is_floating_point():
            value = _detached(module.graph, value, node)
        item.replace_all_uses_with(value)
        module.graph.erase_node(item)
    module.graph.erase_node(node)
    if not getter.users:
        module.graph.erase_node(getter)


def _given_back(value: fx.Node) -> fx.Node:
    """What an op gives back as it is: x.to(x.dtype) is x, and keeps its gradient in any block.
    Readers of x behind the block read what came out of it."""
    while (same := _operand_itself(value)) is not None:
        value = same
    return value


def _operand_itself(value: fx.Node) -> fx.Node | None:
    """The operand that an op returns, asked of the op itself: a view of it is another tensor."""
    is_part = value.target is operator.getitem
    op = value.args[0] if is_part else value
    if not isinstance(op, fx.Node) or not isinstance(op.target, torch._ops.OpOverload):
        return None
    form, operands = _form(value), op.all_input_nodes
    alike = [node for node in operands if form is not None and _form(node) == form]
    if not alike or _written(op) is not None:
        return None
    args, kwargs = fx.node.map_arg((op.args, op.kwargs), lambda node: node.meta["val"])
    with alike[0].meta["val"].fake_mode, torch.no_grad():
        made = op.target(*args, **kwargs)
    made = made[value.args[1]] if is_part else made
    return next((node for node in alike if node.meta["val"] is made), None)


def _form(node: fx.Node) -> object:
    value: Any = node.meta.get("val")
    return (value.shape, value.dtype, value.device) if is_fake(value) else None


def _detach_what_is_written(graph: fx.Graph, op: fx.Node) -> None:
    """What an in-place op of a no_grad block writes has no gradient behind the block either."""
    for value in _others(op) if _written(op) is not None else ():
        if isinstance(value.meta.get("val"), torch.Tensor) and not _is_whole(value):
            op.replace_input_with(value, _detached(graph, value, op.prev))


def _refuse_change_of_outer_value(op: fx.Node, outer: Mapping[fx.Node, Any]) -> None:
    """Refuses an in-place op on a tensor with a gradient inside no_grad: its gradient skips the
    change, which a graph of pure ops cannot say."""
    written = _written(op)
    base = _chain(written)[-1] if isinstance(written, fx.Node) else None
    if base is not None and base.op == "placeholder" and _carries_gradient(outer[base]):
        raise CaptureError(
            f"{op.target} changes a tensor inside torch.no_grad whose gradient is used; "
            "write it out of place (a parameter: between steps)",
            op=str(op.target),
            source=line_in(op.meta.get("stack_trace") or ""),
        )


def _part_written_detaches(graph: fx.Graph) -> None:
    """Makes a copy of x.detach() where an in-place op writes into it what has a gradient: without
    mutation it would be detached once more after the write.

    Raises CaptureError where x is read afterwards, or outlives the call, and x or what is written
    has a gradient: the values that are read have changed, their gradient has not."""
    position = {node: k for k, node in enumerate(graph.nodes)}
    copied: set[fx.Node] = set()
    for node, here in position.items():
        written = _written(node)
        chain = _chain(written) if isinstance(written, fx.Node) else []
        detached = next((value for value in chain if value.target in _DETACHES), None)
        if detached is None:
            continue
        source = chain[-1]
        writes_gradient = _IN_NO_GRAD not in node.meta and any(
            map(_carries_gradient, _others(node))
        )
        is_read = source.op in ("placeholder", "get_attr") and writes_gradient
        if not is_read and (writes_gradient or _carries_gradient(source)):
            is_read = any(position[r] > here for r in _readers(source, without=detached))
        if is_read:
            raise CaptureError(
                f"{node.target} changes, through detach(), a tensor whose gradient is used; write "
                "it out of place",
                op=str(node.target),
                source=line_in(node.meta.get("stack_trace") or ""),
            )
        if writes_gradient and detached not in copied:
            copied.add(detached)
            _copy(graph, detached)


def _others(op: fx.Node) -> list[fx.Node]:
    """What an in-place op reads besides what it writes to."""
    return [value for value in op.all_input_nodes if value is not _written(op)]


def _copy(graph: fx.Graph, value: fx.Node) -> None:
    """A copy of `value` for all that read it."""
    with graph.inserting_after(value):
        copy = graph.call_function(torch.ops.aten.clone.default, (value,))
    copy.meta = dict(value.meta)
    value.replace_all_uses_with(copy, lambda user: user is not copy)


def _written_into(value: fx.Node) -> list[fx.Node]:
    """What in-place ops outside of no_grad blocks write into the memory of a value; of a detached
    one, through itself and views of it."""
    found: list[fx.Node] = []
    root = value if value.target in _DETACHES else _chain(value)[-1]
    for reader in _readers(root):
        written = _written(reader)
        if isinstance(written, fx.Node) and _IN_NO_GRAD not in reader.meta:
            found += _others(reader) if root in _chain(written) else ()
    return found


def _chain(value: fx.Node) -> list[fx.Node]:
    """A value, what it is a view of, and so on."""
    found = [value]
    while (below := _base(found[-1])) is not None:
        found.append(below)
    return found


def _readers(value: fx.Node, without: fx.Node | None = None) -> set[fx.Node]:
    """What reads a value or a view of it, but not the view `without` and those of it."""
    found: set[fx.Node] = set()
    pending = [value]
    while pending:
        read = pending.pop()
        for user in read.users:
            if user is not without and user not in found:
                found.add(user)
                if _base(user) is read:
                    pending.append(user)
    return found


def _written(op: fx.Node) -> Any:
    """What an in-place op writes to; None for any other."""
    if not isinstance(op.target, torch._ops.OpOverload):
        return None
    for k, argument in enumerate(op.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return op.args[k] if k < len(op.args) else op.kwargs.get(argument.name)
    return None


def _base(op: fx.Node) -> fx.Node | None:
    """The operand that the result of an op is, or may be, or may be a part of; None for others."""
    if op.target is operator.getitem and isinstance(parts := op.args[0], fx.Node):
        return parts if _base(parts) is not None else None
    schema = getattr(op.target, "_schema", None)
    if op.op != "call_function" or schema is None:
        return None
    for k, argument in enumerate(schema.arguments):
        if argument.alias_info is not None:
            value = op.args[k] if k < len(op.args) else op.kwargs.get(argument.name)
            return value if isinstance(value, fx.Node) else None
    return None


def _carries_gradient(value: fx.Node) -> bool:
    """Whether `value` depends on a parameter that requires a gradient, past no detach; also by what
    is written into its memory, before or after."""
    seen, stack = {value}, [value]
    while stack:
        node = stack.pop()
        if node.op == "placeholder" and node.meta["val"].requires_grad:
            return True
        if _is_whole(node):
            continue
        is_block = str(node.target) == _BLOCK
        is_cut = node.target in _DETACHES or _IN_NO_GRAD in node.meta
        if is_block and not node.args[0]:
            continue
        inputs = () if is_cut else node.all_input_nodes
        sources = dict.fromkeys((*inputs, *_written_into(node)))
        new = [n for n in sources if n not in seen]
        seen.update(new)
        stack += new
    return False


def _is_whole(value: fx.Node) -> bool:
    """Whether a value has whole numbers or bools, through which no gradient flows."""
    made = value.meta.get("val")
    if not isinstance(made, torch.Tensor):
        return False
    return not (made.is_floating_point() or made.is_complex())


def _detached(graph: fx.Graph, value: fx.Node, after: fx.Node) -> fx.Node:
    with graph.inserting_after(after):
        detached = graph.call_function(torch.ops.aten.detach.default, (value,))
    detached.meta = dict(value.meta)
    return detached


def refuse_lost_gradients(
    outputs: Iterable[torch.Tensor], known: set[torch.Tensor]
) -> set[torch.Tensor]:
    """Refuse what a graph would lose: the backward of an autograd.Function of torch's own, which
    traces as its forward only, and the gradient of a parameter that is not registered. Returns the
    leaves that get a gradient."""
    reached: set[torch.Tensor] = set()
    stack: list[Any] = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if isinstance(node, torch.autograd.function.BackwardCFunction) and not (
            is_of_op(node) or is_of_part(node)
        ):
            name = type(node).__name__.removesuffix("Backward")
            raise CaptureError(
                f"{name} is a torch.autograd.Function, whose own backward a captured graph loses; "
                "write it with ordinary ops",
                op=name,
                source=definition(vars(type(node)).get("_forward_cls") or type(node)),
            )
        # Only the node that accumulates into a leaf has a variable.
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            reached.add(leaf)
        if leaf is not None and leaf not in known:
            shape = tuple(leaf.shape)
            raise CaptureError(
                f"a tensor of shape {shape} requires a gradient but is no registered parameter, "
                "so it would be frozen; register it (nn.ParameterList for a list)",
                op="nn.Parameter",
            )
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
    return reached


def refuse_severed(
    program: ExportedProgram, reached: set[torch.Tensor], parameters: Mapping[str, torch.Tensor]
) -> None:
    """Raises CaptureError where a parameter that gets a gradient of the model, one of `reached`,
    gets none of the program. parameters: by their names in it."""
    targets = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs}
    stack = [*program.graph.output_node().all_input_nodes]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if node.target not in _DETACHES:
            new = {n for n in node.all_input_nodes if n not in seen}
            seen |= new
            stack += new
    found = {parameters.get(str(targets[n.name])) for n in seen if n.op == "placeholder"}
    for name, parameter in parameters.items():
        if parameter in reached and parameter not in found:
            raise CaptureError(
                f"a gradient inside of forward loses that of {name.partition('.')[2]} in a trace; "
                "write it by formula, or outside of the model",
                op="torch.autograd.grad",
            )
