"""Loops over experts that are modules of their own, in a form that a graph can hold: what
meshfold.capture.expert_loops.recognition recognises in a forward becomes one call of `routed`.

    rows     every place of the ids is a row, with the row of x that it stands for
    experts  the forward of the first expert runs on all rows; each of its linears multiplies a row
             with the weights of that row's expert, stacked and gathered, from which
             meshfold.capture.rewrites.expert_linear makes expert_linear
    results  times weights, summed over the places of a row, added to what was there

Experts that are not alike, that hold more than linears, or whose forward mixes rows keep their
loop.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from tokenize import TokenError
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, resolve_name

from meshfold.capture.expert_loops.builds import are_alike, is_of_linears
from meshfold.capture.expert_loops.recognition import Loop, rewritten
from meshfold.errors import CaptureError
from meshfold.torch_compat.source_lines import is_user_file

_ROUTED = "_meshfold_routed"


def without_loops_of(module: nn.Module) -> Callable[..., Any] | None:
    """The forward of a module's class with its loops over experts replaced; None if it has none
    that are known."""
    if not _may_loop(module):  # first: a module of torch.jit has no forward in its class
        return None
    function = type(module).forward
    if inspect.unwrap(function) is not function:
        return None
    code = getattr(function, "__code__", None)
    if code is None or code.co_freevars or not is_user_file(code.co_filename):
        return None
    try:
        lines, first = inspect.getsourcelines(function)
        (tree,) = ast.parse(textwrap.dedent("".join(lines))).body
    except (OSError, TypeError, SyntaxError, ValueError, TokenError):
        # TokenError: the file is not the one that was run, or no longer.
        return None
    if not isinstance(tree, ast.FunctionDef) or tree.decorator_list:
        return None
    loops: list[Loop] = []

    def call(loop: Loop) -> ast.stmt:
        loops.append(loop)
        return _call_of(loop)

    own = code.co_varnames[0] if code.co_argcount else ""
    if not rewritten(tree, call) or not all(_fits(module, own, loop) for loop in loops):
        return None
    ast.increment_lineno(tree, first - 1)
    # A function around it gives it the name `routed`, so that its globals stay the model's.
    (around,) = ast.parse(f"def around({_ROUTED}):\n    return None").body
    assert isinstance(around, ast.FunctionDef)
    around.body = [tree, ast.Return(ast.Name(tree.name, ast.Load()))]
    module_tree = ast.fix_missing_locations(ast.Module([around], []))
    defined: dict[str, Any] = {}
    exec(compile(module_tree, code.co_filename, "exec"), function.__globals__, defined)
    made: Callable[..., Any] = defined["around"](routed)
    made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return made


def _may_loop(module: nn.Module) -> bool:
    lists = [c for c in module.children() if isinstance(c, nn.ModuleList) and len(c) > 1]
    return any(modules[0] is not None and is_of_linears(modules[0]) for modules in lists)


def _fits(module: nn.Module, own: str, loop: Loop) -> bool:
    """Whether the experts of a loop are a list of the module, which its forward calls `own`, and
    alike."""
    owner, _, name = loop.experts.partition(".")
    experts = module._modules.get(name) if owner == own else None
    return isinstance(experts, nn.ModuleList) and are_alike(list(experts))


def _call_of(loop: Loop) -> ast.stmt:
    """out = _meshfold_routed(out, ...), or out.copy_(...)"""
    weights = loop.weights or "None"
    order = loop.order or "None"
    made = (
        f"{_ROUTED}({loop.out}, list({loop.experts}), {order}, {loop.ids}, {loop.x}, "
        f"{weights}, by={loop.by!r}, adds={loop.adds}, by_expert={loop.by_expert})"
    )
    text = f"{loop.out}.copy_({made})" if loop.in_place else f"{loop.out} = {made}"
    return ast.parse(text).body[0]


def routed(
    out: Tensor,
    experts: Sequence[nn.Module],
    order: range | None,
    ids: Tensor,
    x: Tensor,
    weights: Tensor | None,
    *,
    by: str,
    adds: bool,
    by_expert: bool,
) -> Tensor:
    """What a Loop makes of `out`. ids [*s, k] where it goes by rows, x [*s, d] and out [*s, o];
    else ids [*s]."""
    if order is not None and list(order) != list(range(len(experts))):
        raise CaptureError(
            f"a loop over experts goes over {order} of {len(experts)}; let it go over all",
            op="nn.ModuleList",
        )
    sums = by != "place"
    places = ids if sums else ids.unsqueeze(-1)
    if x.shape[:-1] != places.shape[:-1] or out.shape[:-1] != places.shape[:-1]:
        raise CaptureError(
            f"a loop over experts takes rows of shapes {tuple(x.shape)} to {tuple(out.shape)} by "
            f"ids of shape {tuple(ids.shape)}; index rows by all dims of the ids but the last",
            op="nn.ModuleList",
        )
    is_chosen = (places >= 0) & (places < len(experts))
    if by == "any":  # a row comes once, however often it names an expert
        same = places.unsqueeze(-1) == places.unsqueeze(-2)
        is_chosen = is_chosen & ~same.tril(-1).any(-1)
    chosen = places.clamp(0, len(experts) - 1)
    rows = x.unsqueeze(-2).expand(*places.shape, x.shape[-1]).reshape(-1, x.shape[-1])
    made = _by_expert(list(experts), rows, chosen.reshape(-1))
    if weights is not None:
        factors = weights.gather(-1, chosen) if by_expert else weights.reshape(places.shape)
        made = made * factors.reshape(-1, 1)
    made = made.reshape(*places.shape, made.shape[-1])
    made = made.to(out.dtype).masked_fill(~is_chosen.unsqueeze(-1), 0.0).sum(-2)
    if adds:
        return out + made
    return torch.where(is_chosen, made, out)


def _by_expert(experts: list[nn.Module], rows: Tensor, ids: Tensor) -> Tensor:
    """rows [t, d] through the experts ids [t]."""
    with _Gathering(experts, ids):
        made: Tensor = experts[0](rows)
    return made


class _Gathering(TorchFunctionMode):
    """In the forward of the first expert, the weights of a row's own expert. Raises CaptureError
    for what may mix rows."""

    def __init__(self, experts: list[nn.Module], ids: Tensor) -> None:
        super().__init__()
        self.ids = ids
        self.stacks: dict[int, Callable[[], Tensor]] = {}
        for name, own in experts[0].named_parameters():
            self.stacks[id(own)] = lambda name=name: torch.stack(  # type: ignore[misc]
                [dict(expert.named_parameters())[name] for expert in experts]
            )

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.linear:
            return self._linear(*args, **(kwargs or {}))
        name = (resolve_name(func) or getattr(func, "__name__", "")).rpartition(".")[2]
        of_last_dim = name in ("chunk", "split") and -1 in (*args[2:3], (kwargs or {}).get("dim"))
        if name not in _BY_ROW and not of_last_dim and "__get__" not in str(func):
            raise CaptureError(
                f"experts in a loop call {name}, of which it is not known that it keeps rows "
                "apart; write them of linears and functions of one element",
                op=name,
            )
        return func(*args, **(kwargs or {}))

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = torch.bmm(self.stacks[id(weight)]()[self.ids], x.unsqueeze(-1)).squeeze(-1)
        return y if bias is None else y + self.stacks[id(bias)]()[self.ids]


_BY_ROW = frozenset(
    "silu gelu relu leaky_relu elu selu celu softplus mish hardswish sigmoid tanh exp square sqrt "
    "pow rsqrt abs neg clamp mul add sub div multiply true_divide relu6 erf dropout to type_as "
    "float half bfloat16 contiguous silu_ relu_ mul_ add_ __mul__ __rmul__ __add__ __radd__ "
    "__sub__ __rsub__ __truediv__ __pow__ __neg__ size dim is_floating_point".split()
)
"""Functions of one element, and what asks for no more than a shape or a dtype."""
