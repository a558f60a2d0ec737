"""Write everything that stops a gradient as a `detach` op, before run_decompositions.

run_decompositions silently drops no_grad blocks and `detach_`: the values would be right and the
gradients wrong. A no_grad block is inlined, with a `detach` on each float result. (Inlined also
because ops of a block otherwise lose the modules that called them.) `detach_` becomes `detach`,
and later readers of the same tensor read the detached one.

What torch.autograd.grad computes in a forward is traced op by op. Without create_graph=True the
results carry no gradient, which the traced ops know nothing of: they are detached. A tensor that
`requires_grad_()` was called on keeps its gradient to itself, since nobody sees it afterwards.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from meshfold.capture.python_state.lost_calls import GRADIENT_MARKS
from meshfold.capture.trace.functions import definition
from meshfold.errors import CaptureError
from meshfold.torch_compat.autograd_functions import is_of_op
from meshfold.torch_compat.fake_tensors import is_fake
from meshfold.torch_compat.source_lines import line_in

_BLOCK = "wrap_with_set_grad_enabled"
_DETACHES = (torch.ops.aten.detach.default, torch.ops.aten.detach_.default)


def write_detaches(module: fx.GraphModule) -> None:
    """Rewrite the graph of `module` in place. Raises CaptureError for what no `detach` can
    say: a tensor with a gradient changed in place inside no_grad."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and str(node.target) == _BLOCK:
            _inline_block(module, node)
    _refuse_writes_to_detached(graph)
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
    for item in list(node.users):
        result = results[item.args[1]]
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


def _refuse_change_of_outer_value(op: fx.Node, outer: Mapping[fx.Node, Any]) -> None:
    """Refuses an in-place op on a tensor with a gradient inside no_grad: its gradient skips the
    change, which a graph of pure ops cannot say."""
    base = _written(op)
    while isinstance(base, fx.Node) and _shares_memory(base):
        base = base.args[0]
    is_outer = isinstance(base, fx.Node) and base.op == "placeholder"
    if is_outer and _carries_gradient(outer[base]):
        raise CaptureError(
            f"{op.target} changes a tensor inside torch.no_grad whose gradient is used; "
            "write it out of place",
            op=str(op.target),
            source=line_in(op.meta.get("stack_trace") or ""),
        )


def _refuse_writes_to_detached(graph: fx.Graph) -> None:
    """Refuses an in-place op on the memory of x.detach() where x has a gradient and is read
    afterwards: the values that are read have changed, their gradient has not."""
    position = {node: k for k, node in enumerate(graph.nodes)}
    for node, here in position.items():
        source, detached = _written(node), None
        while isinstance(source, fx.Node) and _shares_memory(source):
            if source.target in _DETACHES and detached is None:
                detached = source
            source = source.args[0]
        if detached is None or not isinstance(source, fx.Node) or not _carries_gradient(source):
            continue
        if any(position[reader] > here for reader in _readers(source, without=detached)):
            raise CaptureError(
                f"{node.target} changes, through detach(), a tensor whose gradient is used; write "
                "it out of place",
                op=str(node.target),
                source=line_in(node.meta.get("stack_trace") or ""),
            )


def _readers(value: fx.Node, without: fx.Node) -> set[fx.Node]:
    """What reads a value or a view of it, but not the view `without` and those of it."""
    found: set[fx.Node] = set()
    pending = [value]
    while pending:
        for user in pending.pop().users:
            if user is not without and user not in found:
                found.add(user)
                if _shares_memory(user):
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


def _shares_memory(op: fx.Node) -> bool:
    """Whether the result of an op is, or may be, its first operand or a part of it."""
    schema = getattr(op.target, "_schema", None)
    if op.op != "call_function" or schema is None:
        return False
    return bool(schema.arguments) and schema.arguments[0].alias_info is not None


def _carries_gradient(value: fx.Node) -> bool:
    """Whether `value` depends on a parameter that requires a gradient, past no detach."""
    seen, stack = {value}, [value]
    while stack:
        node = stack.pop()
        if node.op == "placeholder" and node.meta["val"].requires_grad:
            return True
        is_block = str(node.target) == _BLOCK
        if node.target in _DETACHES or (is_block and not node.args[0]):
            continue
        new = [n for n in node.all_input_nodes if n not in seen]
        seen.update(new)
        stack += new
    return False


def _detached(graph: fx.Graph, value: fx.Node, after: fx.Node) -> fx.Node:
    with graph.inserting_after(after):
        detached = graph.call_function(torch.ops.aten.detach.default, (value,))
    detached.meta = dict(value.meta)
    return detached


_PLACE_OF_CREATE_GRAPH = 4


_OTHER_GRADIENTS = "write it by formula, with torch.func.jvp, or outside of the model"


class InnerGradients:
    """What a traced forward does with gradients. asked: the function that it computes them with,
    at the line `source`."""

    def __init__(self) -> None:
        self.asked = self.source = ""
        self._leaves: list[torch.Tensor] = []

    def seen(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
        line: Callable[[], str],
    ) -> Any:
        """The result of a call, without a gradient where torch gives it none."""
        if func in GRADIENT_MARKS and not isinstance(args[0], nn.Parameter):
            self._leaves.append(args[0])
        if func is not torch.autograd.grad:
            return result
        self.asked, self.source = "torch.autograd.grad", self.source or line()
        places = dict(enumerate(args))
        if kwargs.get("create_graph", places.get(_PLACE_OF_CREATE_GRAPH)):
            return result
        return tuple(None if g is None else g.detach() for g in result)

    def repair(self) -> str:
        """What to do where a trace fails that computes gradients; "" for another one."""
        return self.asked and (
            "a gradient inside of forward goes through what a trace cannot take backward; "
            + _OTHER_GRADIENTS
        )

    def refuse_unseen(self, constants: Mapping[str, Any]) -> None:
        """Raises CaptureError where a gradient went through what the trace does not know: results
        that autograd had kept, which are constants without values."""
        if self.asked and any(map(is_fake, _tensors(constants))):
            raise CaptureError(
                f"{self.asked} inside of forward goes back through results of ops, which a trace "
                f"does not see again; {_OTHER_GRADIENTS}",
                op=self.asked,
                source=self.source,
            )

    def refuse_kept(self, model: nn.Module) -> tuple[torch.Tensor, ...]:
        """The tensors whose gradient ends with the call. Raises CaptureError for one that the
        model keeps and is no parameter: an optimizer may have it."""
        kept = {
            id(value)
            for module in model.modules()
            for held in (*vars(module).values(), *module._buffers.values())
            for value in _contents(held)
        }
        if any(id(leaf) in kept for leaf in self._leaves):
            raise CaptureError(
                "forward calls requires_grad_ on a tensor that the model keeps and that is no "
                "parameter, so it would be frozen; register it as an nn.Parameter",
                op="torch.Tensor.requires_grad_",
            )
        return tuple(self._leaves)

    def refuse_accumulated(self, model: nn.Module, inputs: Iterable[torch.Tensor]) -> None:
        """Raises CaptureError where forward has written to `.grad`, which no graph does:
        torch.autograd.backward is no function that a mode sees, but it leaves this behind."""
        named = {f"of {name}": parameter for name, parameter in model.named_parameters()}
        others = dict.fromkeys((*self._leaves, *inputs), "of a tensor")
        for tensor, whose in (*((p, n) for n, p in named.items()), *others.items()):
            if tensor.is_leaf and tensor.grad is not None:
                raise CaptureError(
                    f"forward writes to .grad {whose}, by torch.autograd.backward or itself, which "
                    "is lost in a graph; return a loss, and call backward outside",
                    op="torch.autograd.backward",
                )


def _tensors(constants: Mapping[str, Any]) -> list[torch.Tensor]:
    return [c for c in constants.values() if isinstance(c, torch.Tensor)]


def _contents(held: Any) -> Iterable[Any]:
    if isinstance(held, Mapping):
        return held.values()
    return held if isinstance(held, (list, tuple)) else (held,)


class NoInnerGradients(TorchFunctionMode):
    """Refuses torch.autograd.grad where layers are no ops that it could go through."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.autograd.grad:
            raise CaptureError("forward calls torch.autograd.grad", op="torch.autograd.grad")
        return func(*args, **(kwargs or {}))


def refuse_lost_gradients(outputs: Iterable[torch.Tensor], known: set[torch.Tensor]) -> None:
    """Refuse what a graph would lose: the backward of an autograd.Function of torch's own, which
    traces as its forward only, and the gradient of a parameter that is not registered."""
    stack: list[Any] = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if isinstance(node, torch.autograd.function.BackwardCFunction) and not is_of_op(node):
            name = type(node).__name__.removesuffix("Backward")
            raise CaptureError(
                f"{name} is a torch.autograd.Function, whose own backward a captured graph loses; "
                "write it with ordinary ops",
                op=name,
                source=definition(vars(type(node)).get("_forward_cls") or type(node)),
            )
        # Only the node that accumulates into a leaf has a variable.
        if hasattr(node, "variable") and node.variable not in known:
            shape = tuple(node.variable.shape)
            raise CaptureError(
                f"a tensor of shape {shape} requires a gradient but is no registered parameter, "
                "so it would be frozen; register it (nn.ParameterList for a list)",
                op="nn.Parameter",
            )
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
