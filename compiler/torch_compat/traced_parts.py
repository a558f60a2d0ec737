"""What torch.export writes down of an op while it traces. The one file that knows the mode that
torch traces with, and the composite ops that it does not look into.

A trace has an op as it is called: `layer_norm`, not what autograd keeps of it for its backward. A
gradient inside of forward that goes back through the op reads just that, and finds it nowhere in
the trace. So such an op is written in parts, and the results that autograd has kept are tied to the
ops that they came from.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._C import _TorchDispatchModeKey
from torch._C._autograd import _get_sequence_nr
from torch._decomp import get_decompositions
from torch._export.utils import _collect_all_valid_cia_ops, _get_decomp_for_cia
from torch._ops import _get_dispatch_mode_pre_dispatch
from torch.fx.experimental.proxy_tensor import decompose, get_proxy_slot, track_tensor
from torch.utils._python_dispatch import TorchDispatchMode

Part = Callable[..., Any]
OnCall = Callable[[Part, Sequence[Any], Mapping[str, Any]], Any]
"""Answers a call of a composite op, given its parts and arguments: with the result of the parts, or
AS_IT_IS."""

AS_IT_IS = NotImplemented
"""The answer of OnCall that leaves an op as it is called."""

_library: Any = torch.library  # untyped
_library.define("meshfold::kept_result", "(Tensor x) -> Tensor")
_library.register_fake("meshfold::kept_result", lambda x: torch.empty_like(x))
_KEPT = torch.ops.meshfold.kept_result.default
_DETACH = torch.ops.aten.detach.default

_WHOLE = (
    *("lstm", "gru", "rnn_tanh", "rnn_relu", "feature_dropout", "alpha_dropout"),
    *("feature_alpha_dropout", "linalg_inv", "linalg_solve", "linalg_cholesky", "linalg_pinv"),
    *("linalg_eig", "linalg_matrix_power", "linalg_tensorinv", "linalg_tensorsolve", "inverse"),
    *("quantile", "nanquantile"),
)
"""Composite ops that stay as they are called: a rewrite knows them, or a part raises by values."""
_FORWARDS = ("native_layer_norm", "native_group_norm", "nll_loss_forward", "nll_loss2d_forward")
"""Parts in turn: a norm's backward knows what it keeps as a function of the input, which no graph
does, and a loss is made of ops that have rules."""
_IN_PLACE = (
    *("abs_", "acos_", "addcdiv_", "addcmul_", "asin_", "atan_", "celu_", "clamp_", "clamp_max_"),
    *("clamp_min_", "cos_", "cosh_", "div_", "erf_", "gelu_", "hardsigmoid_", "hardswish_"),
    *("log1p_", "log_", "mish_", "mul_", "pow_", "silu_", "sin_", "sinh_", "xlogy_"),
)
"""Ops of which autograd keeps a copy of what was there before, that nobody else sees."""
_BACKWARDS = (
    *("_log_softmax_backward_data", "_prelu_kernel_backward", "_softmax_backward_data"),
    *("binary_cross_entropy_backward", "diagonal_backward", "elu_backward", "gelu_backward"),
    *("embedding_dense_backward", "glu_backward", "hardsigmoid_backward", "hardswish_backward"),
    *("hardtanh_backward", "huber_loss_backward", "leaky_relu_backward", "logit_backward"),
    *("mish_backward", "mse_loss_backward", "native_dropout_backward"),
    *("nll_loss2d_backward", "nll_loss_backward", "select_backward", "sigmoid_backward"),
    *("silu_backward", "slice_backward", "smooth_l1_loss_backward", "softplus_backward"),
    *("tanh_backward", "threshold_backward", "unfold_backward"),
)
"""Backwards that torch writes in ops that have rules; what they read and has no gradient does not
depend on their input."""


@contextmanager
def in_parts(on_call: OnCall, others: Mapping[str, Part]) -> Iterator["KeptResults | None"]:
    """While torch.export traces, a context in which on_call answers calls of composite ops. others:
    parts by the name of an op ("aten.linear.default"), where torch has none that do. Yields None
    where nothing is traced."""
    get_mode: Any = _get_dispatch_mode_pre_dispatch  # untyped
    mode = get_mode(_TorchDispatchModeKey.PROXY)
    if mode is None:
        yield None
        return
    # Torch 2.11 has a table of its own beside the mode's, which is empty where export traces.
    with decompose(_table(on_call, others)), KeptResults(mode.tracer) as kept:
        yield kept


def _table(on_call: OnCall, others: Mapping[str, Part]) -> dict[Any, Part]:
    aten = torch.ops.aten
    composite: set[Any] = _collect_all_valid_cia_ops()
    parts: dict[Any, Part] = {
        op: _get_decomp_for_cia(op)
        for op in composite
        if op.namespace == "aten" and op._schema.name.removeprefix("aten::") not in _WHOLE
    }
    parts |= get_decompositions([getattr(aten, name).default for name in _FORWARDS])
    for name in _IN_PLACE:
        parts |= _out_of_place(getattr(aten, name), getattr(aten, name[:-1]))
    for name, part in others.items():
        _, packet, overload = name.split(".")
        parts[getattr(getattr(aten, packet), overload)] = part
    backwards = get_decompositions([getattr(aten, name).default for name in _BACKWARDS])
    return {**backwards, **{op: _answered(on_call, part) for op, part in parts.items()}}


def _out_of_place(written: Any, pure: Any) -> dict[Any, Part]:
    """Parts of in-place ops by the pure one: of a copy of what was there."""

    def part(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return x.copy_(pure(x.clone(), *args, **kwargs))

    return {getattr(written, name): part for name in written.overloads() if "out" not in name}


def _answered(on_call: OnCall, part: Part) -> Part:
    return lambda *args, **kwargs: on_call(part, args, kwargs)


class KeptResults(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Ties the results that autograd keeps, which are tensors of their own, to the ops that they
    came from. A kept result is made by a detach below the trace, and read by one of that."""

    def __init__(self, tracer: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracer = tracer
        self._loose: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is _DETACH:
            self._loose.append((result, args[0]))
        return result

    def tie(self) -> None:
        """To be called before autograd reads what it has kept."""
        for kept, result in self._loose:
            source: Any = get_proxy_slot(result, self._tracer, None)
            if source is None or get_proxy_slot(kept, self._tracer, None) is not None:
                continue
            # A result without a gradient, as the statistics of a norm, stays without one.
            op = _KEPT if result.requires_grad else _DETACH
            proxy = self._tracer.create_proxy("call_function", op, (source.proxy,), {})
            proxy.node.meta["val"] = kept
            track_tensor(kept, proxy, constant=None, tracer=self._tracer)
        self._loose.clear()


def read_kept_results(module: fx.GraphModule) -> None:
    """Let readers of kept results, in the graph of `module` and of its blocks, read the ops."""
    for node in list(module.graph.nodes):
        if node.target is not _KEPT:
            continue
        for reader in list(node.users):
            if reader.target is _DETACH:
                reader.replace_all_uses_with(node.args[0])
                module.graph.erase_node(reader)
        node.replace_all_uses_with(node.args[0])
        module.graph.erase_node(node)
    for child in module.children():
        if isinstance(child, fx.GraphModule):
            read_kept_results(child)


def op_number() -> int:
    """The number that the next op has, among all of which autograd knows."""
    return _get_sequence_nr()


def ops_between(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> set[int]:
    """Numbers of the ops that a gradient of `inputs` goes through, from `outputs` back."""
    ends = {_node_of(x) for x in inputs}
    order: list[Any] = []
    seen: set[Any] = set()
    stack = [(node, False) for node in {_node_of(x) for x in outputs} - {None}]
    while stack:
        node, is_left = stack.pop()
        if is_left:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in node.next_functions if child is not None]
    leading: set[Any] = set()
    for node in order:  # what a node reads comes before it
        if node in ends or any(child in leading for child, _ in node.next_functions):
            leading.add(node)
    return {node._sequence_nr() for node in leading}


def _node_of(tensor: torch.Tensor) -> Any:
    """Of the backward; for a leaf the one that adds to its gradient."""
    return torch.autograd.graph.get_gradient_edge(tensor).node if tensor.requires_grad else None
