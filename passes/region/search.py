"""The search inside one region: the cheapest typing of its ops, exactly, by elimination.

Problem. A region is a straight-line program of ops over values. Choose for every op o a joint rule
r_o (one axis rule per mesh axis), for every slot and output one of its allowed layouts, so that

    sum_o  t_o(r_o)                            time of the op, forward and backward
  + sum_v  tree_v(native(v), {demands(v)})     cheapest shared conversions of every value
  + sum_p  w_p(stored, used) + price * bytes   conversions and memory price of every parameter

is smallest. passes/region/factors.py writes this as tables over the r_o,
passes/region/elimination.py minimises their sum, exactly unless more of them meet than memory takes
(passes/region/conditioning.py); _solution reads the typing back and passes/price/region.py prices
it again from the conversions that will be emitted. Nothing here knows
what a layer is: pairs of column- and row-parallel products, sequence and vocabulary parallel come
out of the rules and the prices.

In: an OpGraph, a mesh, a cost model, the layouts its surroundings allow. Out: a RegionTyping.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.ir.op_graph import OpGraph
from meshfold.ir.spmd import Layout
from meshfold.ir.strategy import RegionTyping
from meshfold.passes.price.op_time import OpTimer, OpTimers
from meshfold.passes.price.region import RegionPrice, RegionPricer
from meshfold.passes.region.conditioning import Conditioned, conditioned
from meshfold.passes.region.constants import shard_constants
from meshfold.passes.region.conversion_tables import ConversionTables
from meshfold.passes.region.elimination import Elimination, EliminationPlans, Factor, Table
from meshfold.passes.region.factors import FactorGraph, Port, build_factors
from meshfold.passes.region.parameter_tables import ParameterPrices, Prices
from meshfold.passes.region.roles import AxisRole, SearchCosts
from meshfold.passes.rules.joint import OpDomain, RuleTable, op_domains
from meshfold.passes.rules.table import AxisRule, region_rules, typing_of

MOST_ENTRIES = 1 << 24
"""Of a table of an exact elimination: 128 MiB, in some tenths of a second."""
MOST_ENTRIES_TOGETHER = 1 << 26
"""Of all tables of one: a second or so, where a plan with stages takes dozens at several prices."""

MAX_JOINT_TABLE = 20_000
"""Entries of the largest table up to which a region is solved at many prices at once."""


@dataclass(frozen=True)
class RegionSolution:
    """The best typing of a region and its exact price."""

    typing: RegionTyping

    rules: tuple[tuple[AxisRule, ...], ...]
    """The rules of every op, one per axis, that its typing stands for."""

    objective_s: float
    """The minimised sum, prices of memory included."""

    slack_s: float
    """What the best typing could save of it at most: 0 where the search was exact."""

    _problem: "RegionProblem" = field(compare=False, repr=False)

    @cached_property
    def pricer(self) -> RegionPricer:
        """Exact prices of the typing, from the conversions that will be emitted, whatever the
        stored layouts of parameters."""
        p = self._problem
        return RegionPricer(p.graph, self.typing, self.rules, p.costs, timers=p.timers)

    @cached_property
    def price(self) -> RegionPrice:
        """The exact price of the typing."""
        return self.pricer.price(self.typing.slots)


@dataclass(frozen=True, eq=False)
class RegionProblem:
    """A region prepared to be solved at several prices. Build it with prepare_region."""

    graph: OpGraph
    costs: CostModel
    table: RuleTable
    domains: tuple[OpDomain, ...]
    timers: tuple[OpTimer, ...]
    times: tuple[Table, ...]
    factors: FactorGraph
    plans: EliminationPlans

    def solve(self, prices: Prices) -> RegionSolution | None:
        """The optimum at these prices, exact however long it takes while single tables fit; None if
        no typing meets the allowed layouts."""
        (found,) = self.optima([prices], most_entries=math.inf)
        return None if found is None else found.solution()

    def optima(
        self, prices: Sequence[Prices], most_entries: float = MOST_ENTRIES_TOGETHER
    ) -> "list[Optimum | None]":
        """What `solve` finds at each of these prices, found in one elimination: which of them is
        meant is one more variable, which is not eliminated."""
        domains, case = list(self.factors.domains), None
        if len(prices) > 1:
            case = len(domains)
            domains.append(len(prices))
        factors = self._tables(prices, case)
        # Prices change entries of tables, not which variables they join.
        plan = self.plans.of(domains, [factor.variables for factor in factors], case)
        if plan.largest_table > MOST_ENTRIES or plan.num_entries > most_entries:
            return [self._conditioned(p) for p in prices]
        found = plan.run([factor.table for factor in factors])
        # A table without parameters is the same in all cases.
        totals = np.broadcast_to(found.table, (len(prices),)).tolist()
        return [
            Optimum(self, p, found, total_s, None if case is None else (k,))
            if np.isfinite(total_s)
            else None
            for k, (p, total_s) in enumerate(zip(prices, totals, strict=True))
        ]

    def _conditioned(self, prices: Prices) -> "Optimum | None":
        """A good typing, from that which shards nothing that is not decided yet: the first rule of
        every op."""
        unsharded = {v: 0 for v in self.factors.ops if v is not None}
        found = conditioned(self.factors.domains, self._tables([prices]), unsharded)
        return None if found is None else Optimum(self, prices, found, found.total, None)

    def _tables(self, prices: Sequence[Prices], case: int | None = None) -> list[Factor]:
        """All factors. case: the variable that numbers the prices, if there are several."""
        tables = list(self.factors.factors)
        for parameter in self.factors.parameters:
            tables += parameter.tables(prices, case)
        return tables

    def with_stored(self, stored: Mapping[int, Layout]) -> "RegionProblem":
        """The same problem with the stored layouts of these parameter slots decided."""
        terms = tuple(
            term.only(stored[term.slot]) if term.slot in stored else term
            for term in self.factors.parameters
        )
        return replace(self, factors=replace(self.factors, parameters=terms))


@dataclass(frozen=True, eq=False)
class Optimum:
    """The optimum of a region at some prices, read back as far as it is asked for. case: values of
    the variables that were not eliminated."""

    problem: RegionProblem
    prices: Prices
    found: Elimination | Conditioned
    objective_s: float
    case: tuple[int, ...] | None

    @property
    def slack_s(self) -> float:
        """By how much another typing could be cheaper at most."""
        return self.objective_s - self.found.lower if isinstance(self.found, Conditioned) else 0.0

    @property
    def is_small(self) -> bool:
        """Whether several of them are found in the time of one."""
        found = self.found
        return isinstance(found, Elimination) and found.largest_table <= MAX_JOINT_TABLE

    @cached_property
    def slots(self) -> tuple[Layout, ...]:
        """The layouts in which slots arrive or are stored."""
        factors, values = self.problem.factors, self._values
        stored: dict[int, Layout] = {}
        for term in factors.parameters:
            if term.stored_variable is not None:
                stored[term.slot] = term.stored[values[term.stored_variable]]
            else:
                stored[term.slot] = term.best_stored(values, self.prices)
        return tuple(
            stored[slot] if port is None else _read(port, values)
            for slot, port in enumerate(factors.slots)
        )

    def solution(self) -> RegionSolution:
        """All of it."""
        problem, factors, values = self.problem, self.problem.factors, self._values
        graph = problem.graph
        choice = [0 if v is None else values[v] for v in factors.ops]
        rules: list[tuple[AxisRule, ...]] = [
            domain.rules[c] for domain, c in zip(problem.domains, choice, strict=True)
        ]
        typing = RegionTyping(
            slots=self.slots,
            ops=tuple(typing_of(graph, k, r) for k, r in enumerate(rules)),
            outputs=tuple(_read(port, values) for port in factors.outputs),
        )
        sizes = problem.costs.mesh.sizes
        typing, joint = shard_constants(graph, problem.table, typing, rules, sizes)
        return RegionSolution(
            typing=typing,
            rules=joint,
            objective_s=self.objective_s,
            slack_s=self.slack_s,
            _problem=problem,
        )

    @cached_property
    def _values(self) -> tuple[int, ...]:
        if isinstance(self.found, Conditioned):
            return self.found.values
        return self.found.assignment(self.case)


class SearchTables:
    """What region problems on one mesh share: conversion and parameter prices already computed.

    roles: one per axis; empty for ANY on all of them. timers: shared with other roles,
    plans: with other meshes, too.
    """

    def __init__(
        self,
        costs: CostModel,
        roles: tuple[AxisRole, ...] = (),
        timers: OpTimers | None = None,
        plans: EliminationPlans | None = None,
    ) -> None:
        self.timers = timers or OpTimers(costs)
        self.plans = plans or EliminationPlans()
        seen = SearchCosts(costs, roles or (AxisRole.ANY,) * len(costs.mesh.axes))
        self.conversions = ConversionTables(seen)
        self.parameters = ParameterPrices(seen)


def prepare_region(
    graph: OpGraph,
    costs: CostModel,
    tables: SearchTables,
    *,
    slot_layouts: Sequence[Sequence[Layout]],
    output_layouts: Sequence[Sequence[Layout]],
    fixed_rules: Mapping[int, Sequence[Collection[str]]] | None = None,
    rules: RuleTable | None = None,
    like: RegionProblem | None = None,
    apart: Collection[int] = (),
) -> RegionProblem:
    """Build the tables of a region.

    slot_layouts[i]: layouts in which slot i may arrive, for a parameter those it may be stored in.
    output_layouts[k]: layouts in which output k may leave. fixed_rules: axis -> rule names per op,
    for axes that are decided already, of most ops to one. rules: region_rules(graph, mesh.sizes) if
    at hand. like: a problem that differs in layouts and roles alone: its domains and the times of
    its ops serve. apart: outputs with a conversion of their own, see build_factors.
    """
    rules = rules or region_rules(graph, costs.mesh.sizes)
    timers = tables.timers.of(graph)
    if like is None:
        domains = op_domains(graph, rules, tables.conversions.legal, fixed_rules)
        times = [
            np.array([timer.time(rules).total_s for rules in domain.rules])
            for timer, domain in zip(timers, domains, strict=True)
        ]
    else:
        domains, times = like.domains, list(like.times)
    factors = build_factors(
        graph,
        domains,
        times,
        tables.conversions,
        tables.parameters,
        slot_layouts,
        output_layouts,
        apart,
    )
    return RegionProblem(graph, costs, rules, domains, timers, tuple(times), factors, tables.plans)


def _read(port: Port, values: Sequence[int]) -> Layout:
    """The layout at a port under an assignment."""
    return port.layouts[0 if port.variable is None else values[port.variable]]
