"""meshfold.register_rule: how an op of the user's may be sharded, what it costs and keeps.

A rule is a record. It counts where it is passed, CompileOptions(custom_rules=...), and nowhere
else: there is no table of rules that one compilation could leave behind for the next.
"""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Function

from meshfold.capture.custom_ops.labels import check_rule, fits
from meshfold.capture.custom_ops.probes import Call
from meshfold.errors import OptionError, UnsupportedOpError
from meshfold.ir.custom_ops import CustomCosts, CustomRule, DimNames
from meshfold.ir.op_graph import Arg, Ref, Value
from meshfold.ops.functions import FunctionOp
from meshfold.ops.registry import torch_target
from meshfold.passes.rules.table import OP_RULES
from meshfold.torch_compat.autograd_functions import overload_of
from meshfold.torch_compat.dtypes import dtype_name, symbol

_LABEL = re.compile(r"[a-z][a-z0-9]*|_")
_UNSHARDED = "_"
_COSTS = ("flops", "backward_flops", "num_bytes", "backward_bytes", "saved_bytes")


def register_rule(
    op: Any,
    equation: str,
    *,
    shards: str | None = None,
    fake: Any = None,
    example: Sequence[Any] | None = None,
    **costs: Any,
) -> CustomRule:
    """The rule of a custom op, for CompileOptions(custom_rules=(...,)).

    op: a class of torch.autograd.Function, or an op of torch.library or its name ("ns::name").
    equation: labels on the dims of its tensor arguments and of its results, "b s _, _ -> b s _"; a
    dim with _ is needed unsharded. shards: the labels that ranks may share, all by default. One
    that a result lacks makes this result a sum over ranks; gradients of arguments without it are
    such sums. fake(*arguments): the results without their numbers, where a Function cannot run on
    tensors without storage. example: arguments of a call; with it the rule is checked at once on
    simulated ranks, forward and every gradient, in float64, else where a model calls the op.

    flops, backward_flops, num_bytes, backward_bytes, saved_bytes: functions of the local shapes of
    the tensor arguments. The first four are the work of one call, saved_bytes what its backward
    needs.

    Raises OptionError for what is no rule, and for one that does not hold.
    """
    target, function = _target_of(op)
    where = f"rule {target}"
    operands, results = _parsed(where, equation)
    found = tuple(dict.fromkeys(label for names in operands for label in names if label))
    chosen = found if shards is None else tuple(shards.split())
    unknown = [label for label in chosen if label not in found]
    if unknown:
        raise OptionError(
            f"{where}: shards: {unknown[0]!r} is on no argument of {equation!r}; write labels of it"
        )
    for name, value in costs.items():
        if name not in _COSTS or not callable(value):
            raise OptionError(
                f"{where}: {name}: no cost as a function of shapes; write {', '.join(_COSTS)}"
            )
    if fake is not None and function is None:
        raise OptionError(f"{where}: fake: is for Functions; write {target!r}'s register_fake")
    rule = CustomRule(
        target, equation, operands, results, chosen, CustomCosts(**costs), fake, function
    )
    if example is not None:
        _check_example(rule, example)
    return rule


def _target_of(op: Any) -> tuple[str, type[Function] | None]:
    """The name of an op, and the Function if it is one."""
    if isinstance(op, type) and issubclass(op, Function):
        return f"{op.__module__}:{op.__qualname__}", op
    if isinstance(op, str):
        name = op.replace("::", ".")
        op = _named(op, name if name.count(".") == 2 else f"{name}.default")
    op = overload_of(op)
    if not isinstance(op, torch._ops.OpOverload):
        raise OptionError(
            f"rule {op!r}: no op; pass a torch.autograd.Function, an op of torch.library, or its "
            "name (ns::name)"
        )
    if str(op) in OP_RULES:
        raise OptionError(f"rule {op}: meshfold has a rule for this op; leave it out")
    return str(op), None


def _named(given: str, name: str) -> Any:
    try:
        return torch_target(name)
    except UnsupportedOpError as error:
        raise OptionError(
            f"rule {given}: torch has no such op; import the package that defines it first"
        ) from error


def _parsed(where: str, equation: str) -> tuple[tuple[DimNames, ...], tuple[DimNames, ...]]:
    """Labels of operands and of results, "" for _."""
    sides = equation.split("->")
    if len(sides) != 2:
        raise OptionError(
            f"{where}: {equation!r} is no equation; write one like 'b s _, _ -> b s _'"
        )
    return _side(where, sides[0]), _side(where, sides[1])


def _side(where: str, text: str) -> tuple[DimNames, ...]:
    tensors = []
    for part in text.split(","):
        names = part.split()
        for name in names:
            if not _LABEL.fullmatch(name):
                raise OptionError(
                    f"{where}: {name!r} is no label; write lower-case names with blanks between, "
                    "or _"
                )
            if name != _UNSHARDED and names.count(name) > 1:
                raise OptionError(f"{where}: {part.strip()!r} has {name!r} twice; write _ for one")
        tensors.append(tuple("" if name == _UNSHARDED else name for name in names))
    return tuple(tensors)


def _check_example(rule: CustomRule, example: Sequence[Any]) -> None:
    operands: list[torch.Tensor] = []

    def described(arg: Any) -> Arg:
        if isinstance(arg, torch.Tensor):
            operands.append(arg)
            return Ref(len(operands) - 1)
        if isinstance(arg, (tuple, list)):
            return tuple(map(described, arg))
        if isinstance(arg, (torch.dtype, torch.device)):
            return symbol(arg)
        return arg  # type: ignore[no-any-return]

    args = tuple(map(described, example))
    function = torch_target(rule.target) if rule.function is None else _function_op(rule)
    try:
        returned = function(*(a.detach() if isinstance(a, torch.Tensor) else a for a in example))
    except Exception as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise OptionError(f"rule {rule.target}: the op raises on its example: {reason}") from error
    results = [returned] if isinstance(returned, torch.Tensor) else list(returned)
    call = Call(
        function,
        args,
        (),
        tuple(_value(t, t.is_floating_point()) for t in operands),
        tuple(_value(t, False) for t in results if t is not None),
    )
    if not fits(call, rule):
        shapes = ", ".join(str(list(t.shape)) for t in operands)
        raise OptionError(
            f"rule {rule.target}: {rule.equation!r} does not fit its example on {shapes}; write "
            "as many arguments and results as the op has, and a label or _ for each dim"
        )
    unchecked = check_rule(call, rule)
    if unchecked:
        raise OptionError(f"rule {rule.target}: cannot be checked on its example: {unchecked}")


def _function_op(rule: CustomRule) -> FunctionOp:
    assert isinstance(rule.function, type)
    return FunctionOp(rule.function, rule.target)


def _value(tensor: torch.Tensor, requires_grad: bool) -> Value:
    return Value(tuple(tensor.shape), dtype_name(tensor.dtype), requires_grad)
