"""The axis rules of the regions of one program, for every size of axis that a search meets.

Labels do not depend on the size of an axis, and the rules depend on it through divisibility alone
(table.py). The answers to all questions of that kind are kept with the rules; a size
that answers every one of them alike has the same rules, and takes them.

    sizes 2, 4 and 8 over dims of 4096, 32 and 8:  one table
    size 16:                                       another, 8 does not divide
"""

from collections.abc import Sequence
from dataclasses import dataclass

from meshfold.ir.op_graph import OpGraph
from meshfold.passes.rules.joint import RuleTable, is_constant_op
from meshfold.passes.rules.ops.labels import OpLabels
from meshfold.passes.rules.ops.shards import Divisions
from meshfold.passes.rules.table import AxisRule, axis_rules, op_labels

RulesOfOps = tuple[tuple[AxisRule, ...], ...]
"""The rules of every op on one axis."""


@dataclass(frozen=True, slots=True)
class _Known:
    """Rules, and the answers that they follow from."""

    divisions: Divisions
    rules: RulesOfOps


class RuleBook:
    """Rules of these graphs, by their number; everything is found once."""

    def __init__(self, graphs: Sequence[OpGraph]) -> None:
        self.graphs = graphs
        self._labels: dict[int, list[OpLabels | None]] = {}
        self._known: dict[int, list[_Known]] = {}
        self._rules: dict[tuple[int, int], RulesOfOps] = {}

    def table(self, region: int, sizes: tuple[int, ...]) -> RuleTable:
        """passes.rules.table.region_rules of one graph."""
        of_axes = [self.rules(region, size) for size in sizes]
        return tuple(tuple(of[k] for of in of_axes) for k in range(len(self.graphs[region].ops)))

    def rules(self, region: int, size: int) -> RulesOfOps:
        """The rules of every op on an axis of `size` ranks; one object for sizes that agree."""
        if (region, size) not in self._rules:
            self._rules[region, size] = self._find(region, size)
        return self._rules[region, size]

    def fallback_ops(self, region: int) -> tuple[str, ...]:
        """Names of the ops that have no rule but to run unsharded, each once."""
        graph = self.graphs[region]
        names = {
            op.target
            for k, (op, labels) in enumerate(zip(graph.ops, self._labels_of(region), strict=True))
            if labels is None and not is_constant_op(graph, k)
        }
        return tuple(sorted(names))

    def _find(self, region: int, size: int) -> RulesOfOps:
        known = self._known.setdefault(region, [])
        for other in known:
            if other.divisions.agree_with(size):
                return other.rules
        divisions = Divisions(size)
        rules = axis_rules(self.graphs[region], self._labels_of(region), divisions)
        known.append(_Known(divisions, rules))
        return rules

    def _labels_of(self, region: int) -> list[OpLabels | None]:
        if region not in self._labels:
            graph = self.graphs[region]
            self._labels[region] = [op_labels(graph, op) for op in graph.ops]
        return self._labels[region]
