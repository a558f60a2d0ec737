"""Texts inside plan.json: layouts, the one-line form of ops and slots, and JSON for people.

    layouts   "S0,I"; "-" on a mesh without axes
    ops       "aten.linear.default  b,o  S0,R I,S0 -> S0,S2"   target, rules, operands -> outputs
    slots     "self_attn.q_proj.weight  S0,I"                  name, layout

"?" stands for a name that the plan does not give. Every parse function raises ValueError.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from meshfold.ir.spmd import Layout, layout_text, parse_layout
from meshfold.ir.strategy import OpTyping

EMPTY = "-"
UNNAMED = "?"
LINE_WIDTH = 110


def write_layout(layout: Layout) -> str:
    return layout_text(layout) or EMPTY


def read_layout(text: str, num_axes: int) -> Layout:
    """Inverse of write_layout; the layout has one type per axis."""
    layout = () if text == EMPTY else parse_layout(text)
    if len(layout) != num_axes:
        raise ValueError(f"{text!r} has {len(layout)} types, the mesh has {num_axes} axes")
    return layout


def write_op(target: str, typing: OpTyping) -> str:
    rules = ",".join(typing.rules) or EMPTY
    inputs = "".join(f"{write_layout(layout)} " for layout in typing.inputs)
    outputs = "".join(f" {write_layout(layout)}" for layout in typing.outputs)
    return f"{target or UNNAMED}  {rules}  {inputs}->{outputs}"


def read_op(line: str, num_axes: int) -> tuple[str, OpTyping]:
    """Inverse of write_op."""
    words = line.split()
    if len(words) < 3 or words.count("->") != 1 or words.index("->") < 2:
        raise ValueError(f"{line!r} is no op; write 'target  rules  operands -> outputs'")
    target, rules, *layouts = words
    names = () if rules == EMPTY else tuple(rules.split(","))
    if len(names) != num_axes:
        raise ValueError(f"{line!r} names {len(names)} rules, the mesh has {num_axes} axes")
    arrow = layouts.index("->")
    inputs, outputs = layouts[:arrow], layouts[arrow + 1 :]
    typing = OpTyping(
        rules=names,
        inputs=tuple(read_layout(text, num_axes) for text in inputs),
        outputs=tuple(read_layout(text, num_axes) for text in outputs),
    )
    return ("" if target == UNNAMED else target), typing


def write_slot(name: str, layout: Layout) -> str:
    return f"{name or UNNAMED}  {write_layout(layout)}"


def read_slot(line: str, num_axes: int) -> tuple[str, Layout]:
    """Inverse of write_slot."""
    words = line.rsplit(maxsplit=1)
    if len(words) != 2:
        raise ValueError(f"{line!r} is no slot; write 'name  layout'")
    name, layout = words
    return ("" if name == UNNAMED else name), read_layout(layout, num_axes)


def names_or_none(names: Iterable[str]) -> tuple[str, ...]:
    """The names, or () when the plan names nothing."""
    found = tuple(names)
    return found if any(found) else ()


def json_text(value: Any) -> str:
    """JSON with short lists and records on one line. Keys keep their order.

    Floats are written so that they read back exactly; NaN and infinity raise ValueError.
    """
    return "".join(_pieces(value, indent=0, used=0)) + "\n"


def _pieces(value: Any, *, indent: int, used: int) -> Iterator[str]:
    """`used` columns of the line are taken by the key in front."""
    flat = json.dumps(value, ensure_ascii=False, allow_nan=False)
    is_leaf = not isinstance(value, dict | list | tuple) or not value
    if is_leaf or (_is_short(value) and indent + used + len(flat) < LINE_WIDTH):
        yield flat
        return
    inner = " " * (indent + 2)
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    items: Sequence[tuple[str, Any]]
    if isinstance(value, dict):
        items = [(f"{json.dumps(key, ensure_ascii=False)}: ", item) for key, item in value.items()]
    else:
        items = [("", item) for item in value]
    yield opening
    for k, (key, item) in enumerate(items):
        yield ("," if k else "") + "\n" + inner + key
        yield from _pieces(item, indent=indent + 2, used=len(key))
    yield "\n" + " " * indent + closing


def _is_short(value: Any) -> bool:
    """Whether the value may stand on one line: at most one level of nesting below it."""
    children = value.values() if isinstance(value, dict) else value
    if any(isinstance(c, str) and "  " in c for c in children):
        return False  # ops and slots: one per line
    nested = [c for c in children if isinstance(c, dict | list | tuple)]
    grandchildren = [g for c in nested for g in (c.values() if isinstance(c, dict) else c)]
    return not any(isinstance(g, dict | list | tuple) for g in grandchildren)
