"""Labels of ops of the user's code: as a rule of theirs says, or as probes prove.

What probes try, per dim d of the operand with the most dims (the first that depends on the batch,
if there is one): operands with as large a dim have the label d there, at the same place from the
front or from the end, or not at all; so do results. A label that every try refutes is none, and an
op without any runs unsharded on every rank. Nothing is added up between samples unless a rule says
so: means and the targets that a loss leaves out do not show in random numbers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from meshfold.capture.custom_ops.probes import Call, CannotRunError, Labels, difference, is_linear
from meshfold.errors import OptionError
from meshfold.ir.custom_ops import CustomOp, CustomRule, DimNames
from meshfold.ir.op_graph import Dependence, Value


@dataclass(frozen=True)
class Known:
    """What is known of a call, and one line about it for the user."""

    custom: CustomOp
    note: str


def ruled(call: Call, rules: Sequence[CustomRule], known: CustomOp) -> Known | None:
    """What a rule of the user's says of a call; None if there is none for it.

    Raises OptionError, naming the rule, if none fits the call, or if it says what is not so.
    """
    if not rules:
        return None
    rule = next((r for r in rules if fits(call, r)), None)
    if rule is None:
        shapes = ", ".join(str(list(v.shape)) for v in call.operands)
        raise OptionError(
            f"rule {rules[0].target}: {rules[0].equation!r} does not fit a call on {shapes}; write "
            "as many operands and results as the op has, and a label or _ for each dim"
        )
    unchecked = check_rule(call, rule)
    custom = replace(
        known,
        operands=rule.operands,
        results=rule.results,
        shards=rule.shards,
        is_linear=is_linear(call),
        costs=rule.costs,
    )
    said = f"its rule {rule.equation!r}, ranks may share {' '.join(rule.shards) or 'nothing'}"
    checked = f"not checked: {unchecked}" if unchecked else "checked on simulated ranks"
    return Known(custom, f"{rule.target}: {said}; {checked}; {_costs(custom)}")


def check_rule(call: Call, rule: CustomRule) -> str:
    """Hold a rule against simulated ranks. Returns why it cannot be, "" if it holds.

    Raises OptionError, naming the rule, if it does not.
    """
    labels = Labels(rule.operands, rule.results)
    for label in rule.shards:
        try:
            wrong = difference(call, labels, label, is_claimed=True)
        except CannotRunError as error:
            return str(error)
        if wrong:
            raise OptionError(
                f"rule {rule.target}: {rule.equation!r} is wrong: {wrong} (two simulated ranks "
                "against one, in float64); correct it"
            )
    return ""


def fits(call: Call, rule: CustomRule) -> bool:
    """Whether a rule is about as many operands and results, of as many dims, each label of one
    size."""
    sizes: dict[str, int] = {}
    sides = ((call.operands, rule.operands), (call.results, rule.results))
    for values, all_names in sides:
        if len(values) != len(all_names):
            return False
        for value, names in zip(values, all_names, strict=True):
            if len(value.shape) != len(names):
                return False
            pairs = zip(names, value.shape, strict=True)
            if any(name and sizes.setdefault(name, size) != size for name, size in pairs):
                return False
    return True


def proven(target: str, call: Call, known: CustomOp) -> Known:
    """What probes prove of a call."""
    base = _base(call.operands)
    operands: list[list[str]] = [[""] * len(v.shape) for v in call.operands]
    results: list[list[str]] = [[""] * len(v.shape) for v in call.results]
    shards: list[str] = []
    try:
        for d in range(len(call.operands[base].shape) if base is not None else 0):
            found = _proven_dim(call, base or 0, d)
            if found is None or _overlaps(found, operands, results):
                continue
            shards.append(f"d{d}")
            for into, names in ((operands, found.operands), (results, found.results)):
                for have, new in zip(into, names, strict=True):
                    have[:] = [a or b for a, b in zip(have, new, strict=True)]
        why = "nothing is proven that ranks could share"
    except CannotRunError as error:
        why = f"it cannot be tried here ({error})"
    custom = replace(
        known,
        operands=tuple(map(tuple, operands)),
        results=tuple(map(tuple, results)),
        shards=tuple(shards),
        is_linear=bool(shards) and is_linear(call),
    )
    if shards:
        dims = ", ".join(label.removeprefix("d") for label in shards)
        said = f"ranks may share its dim {dims}, as probes show"
    else:
        said = f"every rank runs it on unsharded values: {why}"
    return Known(custom, f"{target}: {said}; {_costs(custom)}")


def _base(operands: Sequence[Value]) -> int | None:
    """The operand whose dims are tried."""
    floats = [k for k, v in enumerate(operands) if v.shape]
    return max(
        floats,
        key=lambda k: (operands[k].depends is Dependence.BATCH, len(operands[k].shape), -k),
        default=None,
    )


def _proven_dim(call: Call, base: int, dim: int) -> Labels | None:
    """Labels that share dim `dim` of operand `base`, if some do. Raises CannotRunError."""
    if call.operands[base].shape[dim] < 2:
        return None
    for labels in _tries(call, base, dim):
        if not difference(call, labels, f"d{dim}"):
            return labels
    return None


def _tries(call: Call, base: int, dim: int) -> Iterator[Labels]:
    shape = call.operands[base].shape
    size, from_end = shape[dim], dim - len(shape)
    seen = set()
    for front, end, parameters in (
        (True, False, False),
        (True, True, True),
        (False, True, True),
        (False, False, False),
    ):
        operands = tuple(
            _at(v.shape, size, dim if front else None, from_end if end else None, f"d{dim}")
            if k != base and (parameters or v.depends is Dependence.BATCH)
            else _at(v.shape, size, dim if k == base else None, None, f"d{dim}")
            for k, v in enumerate(call.operands)
        )
        results = tuple(_at(v.shape, size, dim, from_end, f"d{dim}") for v in call.results)
        if all(any(names) for names in results) and operands not in seen:
            seen.add(operands)
            yield Labels(operands, results)


def _at(
    shape: Sequence[int], size: int, front: int | None, end: int | None, label: str
) -> DimNames:
    """`label` at the first of two places where a dim is `size`."""
    for place in (front, None if end is None else len(shape) + end):
        if place is not None and 0 <= place < len(shape) and shape[place] == size:
            return tuple(label if k == place else "" for k in range(len(shape)))
    return ("",) * len(shape)


def _overlaps(found: Labels, operands: list[list[str]], results: list[list[str]]) -> bool:
    """Whether a dim would have two labels."""
    new = (*found.operands, *found.results)
    pairs = zip(new, (*operands, *results), strict=True)
    return any(a and b for names, have in pairs for a, b in zip(names, have, strict=True))


def _costs(custom: CustomOp) -> str:
    known: Mapping[str, object] = vars(custom.costs)
    if known["flops"] is None and known["num_bytes"] is None:
        return "its time is an estimate, from the bytes that it reads and writes"
    return "its time is as its rule says"
