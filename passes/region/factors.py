"""The region search as a factor graph: variables and tables over them.

Variables (x_i of elimination.py)
    r_o   joint rule of op o, o not constant                         domain: joint.OpDomain
    s_j   arriving layout of slot j, q_j leaving layout of output j   only where several are allowed
    p_j   stored layout of a parameter with several users
    z_v   carrier of a value with three or more users, see below

Factors, all in seconds
    op time          t_o[r_o]: roofline time of forward and backward on local sizes, plus the
                     collectives inside the rule                         (op_time.OpTimer)
    parameter        min over stored layouts s of  w[s, u] + state price * bytes(s) + used price *
                     bytes(u), u the layout the user's rule reads: a table over r_user alone
                                                                              (ParameterTerm.tables)
    conversions      per value v with native layout t (of its producer) and demanded layouts e_i,
                     shared: a later layout may be converted from an earlier one. With the
                     conversion matrix M of conversion_tables.py
        one user     M[t, e]
        two users    min( M[t,e1] + M[t,e2],  M[t,e1] + M[e1,e2],  M[t,e2] + M[e2,e1] )
        more         set: z_v = (t, X), X at most m further layouts,
                     tree(t, X) + sum_i min over y in {t} + X of M[y, e_i];
                     carrier, where even m = 1 has more than SET_LIMIT values: z_v is one layout,
                     M[t, z] + sum_i M[z, e_i]
    m is the largest of 3, 2, 1 within SET_LIMIT. The set is exact for up to m distinct foreign
    demands; a shared layout that no user reads may make it too cheap by what that stop saves, and
    the carrier too dear where users are cheapest served from two layouts. The solution is priced
    exactly afterwards (price/region.py).
    constants        every user slices for itself: M[I, e], a table over r_user alone
"""

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from meshfold.ir.op_graph import Dependence, OpGraph, SlotKind, Value
from meshfold.ir.spmd import Layout
from meshfold.passes.region.conversion_tables import ConversionTables
from meshfold.passes.region.elimination import Factor, Table
from meshfold.passes.region.parameter_tables import ParameterPrices, Prices
from meshfold.passes.rules.joint import OpDomain, is_constant_op

SET_LIMIT = 300
"""Values of a set variable: above, its tables cost more time than exactness is worth."""


@dataclass(frozen=True, slots=True)
class Port:
    """What a variable says about one value: under its value c the layout is layouts[c].

    variable None: the layout is fixed and `layouts` has one entry.
    """

    variable: int | None
    layouts: tuple[Layout, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ParameterTerm:
    """A parameter slot: its allowed stored layouts, and the users that read it.

    stored_variable is None where there is at most one user: the stored layout is folded away.
    """

    slot: int
    stored: tuple[Layout, ...]
    stored_variable: int | None
    users: tuple[Port, ...]
    conversion_s: tuple[Table, ...]
    stored_bytes: Table
    used_bytes: tuple[Table, ...]
    forbidden_s: Table
    """[stored layout] -> 0, or +inf where it was ruled out after the tables were built."""

    def only(self, layout: Layout) -> "ParameterTerm":
        """The same term with one stored layout left."""
        ruled_out = [0.0 if s == layout else np.inf for s in self.stored]
        return replace(self, forbidden_s=np.array(ruled_out))

    def scopes(self) -> list[tuple[int, ...]]:
        """The variables of every factor of `tables`, without `case`."""
        own = () if self.stored_variable is None else (self.stored_variable,)
        return [
            tuple(dict.fromkeys((*own, *(() if u.variable is None else (u.variable,)))))
            for u in self.users
        ]

    def tables(self, prices: Sequence[Prices], case: int | None = None) -> list[Factor]:
        """The parameter factors. case: a variable that numbers the prices, needed for several."""
        out = []
        for user, cost in zip(self.users, self._costs(prices), strict=True):
            if self.stored_variable is None:
                out.append(_factor((user,), cost.min(axis=1), case))
            else:
                stored = Port(self.stored_variable, self.stored)
                out.append(_factor((stored, user), cost, case))
        return out

    def _costs(self, prices: Sequence[Prices]) -> list[Table]:
        """[price, stored, used] -> seconds, for every user."""
        if len(prices) == 1 and prices[0] == Prices():
            return [(convert + self.forbidden_s[:, None])[None] for convert in self.conversion_s]
        state_price = np.array([p.state_s_per_byte for p in prices])
        used_price = np.array([p.used_s_per_byte for p in prices])
        state = self.forbidden_s + state_price[:, None] * self.stored_bytes
        num_users = len(self.users)
        return [
            convert + (used_price / num_users)[:, None, None] * used + state[:, :, None] / num_users
            for convert, used in zip(self.conversion_s, self.used_bytes, strict=True)
        ]

    def best_stored(self, values: Sequence[int], prices: Prices) -> Layout:
        """The stored layout under an assignment of all variables."""
        cost = self.forbidden_s + prices.state_s_per_byte * self.stored_bytes
        for user, convert in zip(self.users, self.conversion_s, strict=True):
            cost = cost + convert[:, 0 if user.variable is None else values[user.variable]]
        return self.stored[int(cost.argmin())]


@dataclass(frozen=True, eq=False)
class FactorGraph:
    """Variables and tables of one region. `slots`, `ops` and `outputs` say where to read a
    solution: the port of every slot but parameters, the variable of every op (None: constant), the
    port of every output."""

    domains: tuple[int, ...]
    factors: tuple[Factor, ...]
    parameters: tuple[ParameterTerm, ...]
    slots: tuple[Port | None, ...]
    ops: tuple[int | None, ...]
    outputs: tuple[Port, ...]


def _factor(ports: Sequence[Port], table: Table, case: int | None = None) -> Factor:
    """A factor over the ports' variables: dims of fixed ports are dropped, and a variable at two
    ports takes the diagonal. A dim more in front is that of `case`, or has one entry."""
    variables = [port.variable for port in ports if port.variable is not None]
    if len(set(variables)) == len(variables):
        result: Table = table[..., *(0 if p.variable is None else slice(None) for p in ports)]
    else:
        letter_of: dict[int, str] = {}
        letters = ""
        for letter, port in zip("abc", ports, strict=False):
            own = letter if port.variable is None else letter_of.setdefault(port.variable, letter)
            letters += own
        result = np.einsum(f"...{letters}->...{''.join(letter_of.values())}", table)
        variables = list(letter_of)
    if case is not None:
        return Factor((case, *variables), result)
    return Factor(tuple(variables), result[0] if result.ndim > len(variables) else result)


@dataclass
class _Builder:
    graph: OpGraph
    tables: ConversionTables
    domains: list[int] = field(default_factory=list)
    factors: list[Factor] = field(default_factory=list)

    def variable(self, size: int) -> int:
        self.domains.append(size)
        return len(self.domains) - 1

    def port(self, allowed: Sequence[Layout]) -> Port:
        """A port with a variable of its own, or a fixed one."""
        assert allowed, "no layout allowed"
        return Port(self.variable(len(allowed)) if len(allowed) > 1 else None, tuple(allowed))

    def add(self, ports: Sequence[Port], table: Table) -> None:
        self.factors.append(_factor(ports, table))

    def convert(self, value: Value, sources: Port, targets: Port) -> Table:
        """M[sources, targets]."""
        matrix, at = self._numbered(value, sources, targets)
        return matrix[np.ix_(at[0], at[1])]

    def _numbered(self, value: Value, *ports: Port) -> tuple[Table, list[list[int]]]:
        layouts = tuple(sorted({layout for port in ports for layout in port.layouts}))
        number = {layout: k for k, layout in enumerate(layouts)}
        return self.tables.matrix(value, layouts), [
            [number[layout] for layout in port.layouts] for port in ports
        ]

    def share(self, value: Value, source: Port, users: Sequence[Port]) -> None:
        """The conversion factors of one value."""
        if len(users) == 1:
            self.add((source, users[0]), self.convert(value, source, users[0]))
        elif len(users) == 2:
            self._two_users(value, source, users[0], users[1])
        elif users:
            self._many_users(value, source, users)

    def _two_users(self, value: Value, source: Port, first: Port, second: Port) -> None:
        m, (t, a, b) = self._numbered(value, source, first, second)
        to_a, to_b = m[np.ix_(t, a)][:, :, None], m[np.ix_(t, b)][:, None, :]
        chain_ab, chain_ba = m[np.ix_(a, b)][None], m[np.ix_(b, a)].T[None]
        cheapest = np.minimum(to_a + np.minimum(to_b, chain_ab), to_b + np.minimum(to_a, chain_ba))
        self.add((source, first, second), cheapest)

    def _many_users(self, value: Value, source: Port, users: Sequence[Port]) -> None:
        m, (natives, *wanted) = self._numbered(value, source, *users)
        foreign = sorted({w for at in wanted for w in at})
        sets = _sets(sorted(set(natives)), foreign)
        if not len(sets):
            self._carrier(value, source, users)
            return
        carrier = Port(self.variable(len(sets)), ((),) * len(sets))
        is_native = np.array(natives)[:, None] == sets[None, :, 0]
        self.add((source, carrier), np.where(is_native, _trees_s(m, sets)[None], np.inf))
        for user, at in zip(users, wanted, strict=True):
            self.add((carrier, user), m[:, at][sets].min(axis=1))

    def _carrier(self, value: Value, source: Port, users: Sequence[Port]) -> None:
        layouts = tuple(sorted({x for port in (source, *users) for x in port.layouts}))
        carrier = self.port(layouts)
        self.add((source, carrier), self.convert(value, source, carrier))
        for user in users:
            self.add((carrier, user), self.convert(value, carrier, user))


def _sets(natives: Sequence[int], foreign: Sequence[int]) -> NDArray[np.intp]:
    """Rows (native, up to three further layouts, filled up with the native one): all of them for
    the most further layouts that SET_LIMIT allows; no row if it does not allow one."""
    others = {t: [x for x in foreign if x != t] for t in natives}
    for most in (3, 2, 1):
        sizes = range(most + 1)
        if sum(math.comb(len(o), n) for o in others.values() for n in sizes) > SET_LIMIT:
            continue
        rows = [
            (t, *extra, *(t,) * (3 - n))
            for t in natives
            for n in sizes
            for extra in itertools.combinations(others[t], n)
        ]
        return np.array(rows, dtype=np.intp)
    return np.zeros((0, 4), dtype=np.intp)


def _trees_s(m: Table, sets: NDArray[np.intp]) -> Table:
    """The cheapest tree of every row, from its first layout over the others: the best order in
    which they are converted, each from the cheapest one that is there. A repeated native costs
    0."""
    best = np.full(len(sets), np.inf)
    for order in itertools.permutations((1, 2, 3)):
        total = np.zeros(len(sets))
        for k, target in enumerate(order):
            ready = sets[:, [0, *order[:k]]]
            total += m[ready, sets[:, target, None]].min(axis=1)
        best = np.minimum(best, total)
    return best


def build_factors(
    graph: OpGraph,
    op_domains: Sequence[OpDomain],
    op_times: Sequence[Table],
    tables: ConversionTables,
    parameter_prices: ParameterPrices,
    slot_layouts: Sequence[Sequence[Layout]],
    output_layouts: Sequence[Sequence[Layout]],
    apart: Collection[int] = (),
) -> FactorGraph:
    """The factor graph of one region. op_times[o][c]: seconds of op o under joint rule c. apart:
    outputs, by number, that are gathered for the user, whom no role of an axis forbids that and who
    asks for no gradient: each has a conversion of its own."""
    b = _Builder(graph, tables)
    ops: list[int | None] = []
    for k, (domain, times) in enumerate(zip(op_domains, op_times, strict=True)):
        variable = None if is_constant_op(graph, k) else b.variable(len(domain))
        ops.append(variable)
        if variable is not None:
            b.factors.append(Factor((variable,), times))
    users = _user_ports(graph, op_domains, ops)
    outputs = tuple(b.port(allowed) for allowed in output_layouts)
    gathered: list[list[Port]] = [[] for _ in graph.values]
    for k, v in enumerate(graph.outputs):
        (gathered if k in apart else users)[v].append(outputs[k])
    for slot, v in graph.mutations:
        # The buffer takes the value, so it leaves as the buffer arrives.
        users[v].append(Port(None, tuple(slot_layouts[slot])))
    slots: list[Port | None] = []
    parameters = []
    for v, value in enumerate(graph.values):
        is_slot = v < len(graph.slots)
        if is_slot and graph.slots[v].kind is SlotKind.PARAMETER:
            slots.append(None)
            parameters.append(_parameter_term(b, v, users[v], slot_layouts[v], parameter_prices))
            continue
        source = b.port(slot_layouts[v]) if is_slot else _native_port(graph, op_domains, ops, v)
        if is_slot:
            slots.append(source)
        for port in gathered[v]:
            b.add((source, port), b.convert(replace(value, requires_grad=False), source, port))
        if value.depends is Dependence.CONSTANT:
            for user in users[v]:
                b.add((source, user), b.convert(value, source, user))
        else:
            b.share(value, source, users[v])
    return FactorGraph(
        tuple(b.domains), tuple(b.factors), tuple(parameters), tuple(slots), tuple(ops), outputs
    )


def _user_ports(
    graph: OpGraph, op_domains: Sequence[OpDomain], ops: Sequence[int | None]
) -> list[list[Port]]:
    """The ports of the ops that read each value. An op that reads a value twice in the same
    layout is one user. Constant ops read constants unsharded, which is free."""
    users: list[list[Port]] = [[] for _ in graph.values]
    for k, op in enumerate(graph.ops):
        if ops[k] is None:
            continue
        for position, v in enumerate(op.operands):
            port = Port(ops[k], op_domains[k].inputs[position])
            if port not in users[v]:
                users[v].append(port)
    return users


def _native_port(
    graph: OpGraph, op_domains: Sequence[OpDomain], ops: Sequence[int | None], v: int
) -> Port:
    """The layouts in which the producer of value v makes it."""
    k = graph.producers[v]
    return Port(ops[k], op_domains[k].outputs[graph.ops[k].outputs.index(v)])


def _parameter_term(
    b: _Builder, slot: int, users: Sequence[Port], stored: Sequence[Layout], p: ParameterPrices
) -> ParameterTerm:
    value = b.graph.values[slot]
    tables = [p.tables(value, stored, user.layouts) for user in users]
    # Vectors are too small for memory to matter, and a price on them would cost communication.
    priced = float(len(value.shape) >= 2)
    return ParameterTerm(
        slot=slot,
        stored=tuple(stored),
        stored_variable=b.variable(len(stored)) if len(users) > 1 else None,
        users=tuple(users),
        conversion_s=tuple([seconds for seconds, _ in tables]),
        stored_bytes=priced * p.num_bytes(value, stored, stored=True),
        used_bytes=tuple([priced * num_bytes for _, num_bytes in tables]),
        forbidden_s=np.zeros(len(stored)),
    )
