"""The best plan on one mesh: strategies per layer, mixed where memory decides, with a lower bound.

    region typings (region/typing.py)  -> candidates per region (candidates.py)
        -> chain of runs under the memory budget (run/search.py) -> strategies per layer
        -> exact step time and peak memory of that program (price/step.py, memory/region.py)

Time is a sum over instances, so the chain is exact in it. Peak memory is not: it is a maximum over
moments. The chain works with a sum (chain.py) and its budget is bisected until the program of a
solution just fits (MeshPlanner._close). The lower bound relaxes that chain, with what is resident
in every program and conversions for free: it is valid for every choice of candidates on this mesh.
"""

import math
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property

from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.options import CompileOptions
from meshfold.ir.spmd import Layout
from meshfold.ir.strategy import TpMode, UniformStrategy
from meshfold.passes.graph.reads import ProgramReads, program_reads
from meshfold.passes.graph.variants import split_regions
from meshfold.passes.memory.local_program import Probe
from meshfold.passes.memory.region import MemoryModel
from meshfold.passes.memory.typed_region import TypedRegion
from meshfold.passes.memory.zero import SlotFacts, program_shards, program_states, slot_facts
from meshfold.passes.one_pass.candidates import (
    RegionChoices,
    StrategyCandidate,
    alike,
    most_sharded,
    region_candidates,
)
from meshfold.passes.one_pass.chain import CandidateChain
from meshfold.passes.one_pass.mode_changes import ModeChanges, mode_changes
from meshfold.passes.one_pass.priced import ClosedChain, MeshPlan, Priced, order_of
from meshfold.passes.one_pass.repair import BUDGET_STEPS, Budgets, made_faster, made_smaller
from meshfold.passes.price.step import estimate_step
from meshfold.passes.region.pins import UnkeptPinError
from meshfold.passes.region.typing import MeshSearch, ProgramTyping

REPAIR_RATIO = 1.05
"""A program of least memory that needs up to this multiple of the capacity is changed candidate by
candidate. Chosen, not measured: further away, single changes are not enough."""

TOLERANCE = 2e-4
"""Relative difference of step time between a program that fits and a faster one that does not, at
which the search for a better one stops. Chosen: far below what the cost model resolves."""

FAR = 0.03
"""How far above its bound a program may be before the smallest is changed towards it, too. The
estimate does not know what layers work with, which the ends of a model may have most of. Chosen."""

MAX_ROUNDS = 10
"""Solutions tried for the largest estimate whose program fits; three or four are usual."""


class MeshPlanner:
    """Candidates and chain of one folded program on one mesh, whose strategies share their axes and
    the part of dp that ZeRO shards over. reads, memory_model: of the program, if at hand."""

    def __init__(
        self,
        folded: FoldedGraph,
        cluster: ClusterSpec,
        search: MeshSearch,
        strategies: Sequence[UniformStrategy],
        options: CompileOptions,
        probe: Probe,
        reads: ProgramReads | None = None,
        memory_model: MemoryModel | None = None,
    ) -> None:
        self.folded = folded
        replicas = max(s.degrees.replicas for s in strategies)
        self.costs: CostModel = search.costs.with_replicas(replicas)
        self.mesh = self.costs.mesh
        self.strategies = strategies
        self.options = options
        self.probe = probe
        self.search = search
        self.reads = reads or program_reads(folded)
        self.reserve_bytes = cluster.reserve_bytes
        self.capacity_bytes = options.memory_bytes or cluster.budget_bytes
        modes = dict.fromkeys(s.tp_mode for s in strategies)
        self.programs: dict[TpMode, ProgramTyping] = {}
        for mode in modes:
            # A mode in which a pinned layout cannot be stored has no program.
            with suppress(UnkeptPinError):
                self.programs[mode] = self.search.solve(zero=0, mode=mode)
        self._priced: dict[tuple[Hashable, ...], Priced] = {}
        self.memory_model = memory_model or MemoryModel(self.costs, probe)

    @property
    def sharded_fraction(self) -> float:
        """How much of the shardable weights tp shards, in the best of its modes."""
        return max(x.sharded_fraction for x in self.programs.values())

    @property
    def has_candidates(self) -> bool:
        """Whether some strategy stores every parameter as the user fixed it."""
        return not self.search.space.pinned or all(self.candidates)

    @cached_property
    def fastest_s(self) -> float:
        """A lower bound without memory: every region at its fastest, conversions free. Compute
        and communication of ops alone, which all candidates of a typing have in common, so that
        none needs to be priced."""
        counts = self.search.counts
        return sum(
            n * min(program.prices[r].ops_s for program in self.programs.values())
            for r, n in counts.items()
        )

    @cached_property
    def candidates(self) -> list[list[StrategyCandidate]]:
        """The candidates of each region."""
        return [self._candidates(r) for r in range(len(self.folded.regions))]

    def uniform(self, strategy: UniformStrategy) -> Priced:
        """The program in which every region takes the candidate of `strategy`, wholly sharded if
        any."""
        candidates = self._uniform_candidates(strategy)
        return self.price([candidates[i.region] for i in self.folded.instances])

    def price(self, assignment: Sequence[StrategyCandidate]) -> Priced:
        """Exact costs when instance i runs under assignment[i]."""
        key = tuple(candidate.key for candidate in assignment)
        if key not in self._priced:
            self._priced[key] = self._price(assignment)
        return self._priced[key]

    def uniform_by_time(self) -> list[UniformStrategy]:
        """The strategies of this planner by the time they take if all regions take them."""
        times: dict[UniformStrategy, float] = {}
        for strategy in self.strategies:
            if not self._is_everywhere(strategy):
                continue
            times[strategy] = sum(
                self.search.counts[r] * candidate.time_s
                for r, candidate in enumerate(self._uniform_candidates(strategy))
            )
        return sorted(times, key=lambda s: (times[s], s.label))

    def uniform_bytes(self, strategy: UniformStrategy) -> int:
        """What the states and the insides of all layers need under one strategy, at least."""
        return self.fixed_bytes + sum(
            self.search.counts[r] * (candidate.states_bytes + candidate.retained_bytes)
            for r, candidate in enumerate(self._uniform_candidates(strategy))
        )

    def plan(self, incumbent_s: float = math.inf) -> MeshPlan:
        """The best program on this mesh and the bound on all of them. incumbent_s: step time of a
        program that is there already; chains that cannot beat it are bounded only."""
        before = len(self._priced)
        closed = []
        for chain in sorted(self.chains, key=lambda chain: chain.bound_s):
            closed.append(self._close(chain, incumbent_s))
            incumbent_s = min(incumbent_s, closed[-1].best_s)
        programs = list(self._priced.values())[before:]
        fitting = [p for p in programs if p.memory.fits]
        launch_s = self.costs.launch_s
        return MeshPlan(
            best=min(fitting, key=order_of) if fitting else None,
            lower_bound_s=min(c.bound_s for c in closed) + launch_s,
            gap_before=max(c.gap_before for c in closed),
            unlimited_s=min(c.unlimited_s for c in closed) + launch_s,
            capped=any(c.capped for c in closed),
            num_priced=len(programs),
            num_infeasible=len(programs) - len(fitting),
        )

    # Candidates.

    def _is_everywhere(self, strategy: UniformStrategy) -> bool:
        """Whether every region has a candidate for it; where the user fixed layouts, some have
        none."""
        like = alike(strategy)
        return all(any(x in of for x in like) for of in self._most_sharded)

    def _uniform_candidates(self, strategy: UniformStrategy) -> list[StrategyCandidate]:
        """The candidate of `strategy` with most parameters sharded, for each region, or of what is
        the same there."""
        like = alike(strategy)
        return [next(of[x] for x in like if x in of) for of in self._most_sharded]

    @cached_property
    def _most_sharded(self) -> list[dict[UniformStrategy, StrategyCandidate]]:
        return [most_sharded(candidates) for candidates in self.candidates]

    def _candidates(self, region: int) -> list[StrategyCandidate]:
        found: list[StrategyCandidate] = []
        for mode, program in self.programs.items():
            choices = RegionChoices(
                self._typed(region, mode, program),
                self._facts[region],
                self._shards[mode][region],
                {i: pin for (r, i), pin in self.search.space.pinned.items() if r == region},
            )
            members = [s for s in self.strategies if s.tp_mode == mode]
            found += region_candidates(choices, members, self.costs, self.options.optimizer)
        return found

    def _typed(self, region: int, mode: TpMode, program: ProgramTyping) -> TypedRegion:
        # The backward of the last layer of all follows its forward: what it would drop is there
        # again at once.
        is_last = self.search.counts[region] == 1 and self.folded.instances[-1].region == region
        return TypedRegion(
            self.folded.regions[region].graph,
            program.typings[region],
            self.search.solutions(mode)[region].pricer,
            self.memory_model,
            self.folded.first_floats[region],
            keeps_all=is_last,
        )

    @cached_property
    def _facts(self) -> list[SlotFacts]:
        return slot_facts(self.folded, self.reads)

    @cached_property
    def _shards(self) -> dict[TpMode, list[dict[int, Layout]]]:
        return {
            mode: program_shards(self.folded, program.typings, self.mesh, mode)
            for mode, program in self.programs.items()
        }

    # The chain.

    @cached_property
    def chains(self) -> tuple[CandidateChain, ...]:
        """What can be solved on this mesh."""
        return tuple(self._chains())

    @cached_property
    def bound_s(self) -> float:
        """No program of this mesh that fits takes less; infinite where none fits."""
        return min(chain.bound_s for chain in self.chains) + self.costs.launch_s

    @property
    def unlimited_s(self) -> float:
        """Step time of the best program if memory were unlimited, before it is priced exactly."""
        return min(chain.unlimited.time_s for chain in self.chains) + self.costs.launch_s

    @cached_property
    def smallest(self) -> Priced:
        """The program with the least memory among the simplest: every layer at its least."""
        candidates = [p for chain in self.chains for _, p in self._smallest_of(chain)]
        return min(candidates, key=lambda p: (p.memory.peak, p.strategy.label))

    def _chains(self) -> Iterator[CandidateChain]:
        """Candidates that may stand together: one layout per tied parameter. Where modes differ in
        it, all regions that hold one are in the same mode, and the others in any."""
        ties = {c.ties for of in self.candidates for c in of} - {None}
        everything = tuple(self.programs)
        held: list[tuple[TpMode, ...]] = [(mode,) for mode in everything]
        if len(held) > 1 and self._modes_agree():
            held = [everything]
        for of_tied in held:
            for tie in sorted(ties, key=bool) or [None]:
                candidates = [
                    [c for c in of if c.strategy.tp_mode in allowed and c.ties in (None, tie)]
                    for of, allowed in (
                        (of, of_tied if facts.tied else everything)
                        for of, facts in zip(self.candidates, self._facts, strict=True)
                    )
                ]
                if all(candidates):
                    yield CandidateChain(
                        self.folded, candidates, self.fixed_bytes, self.changes, self.capacity_bytes
                    )

    @cached_property
    def fixed_bytes(self) -> int:
        """Framework, buffers, constants and the batch, in the mode with the least of them."""
        states = [
            program_states(self.folded, program.typings, self.mesh)
            for program in self.programs.values()
        ]
        return self.reserve_bytes + min(x.buffers + x.inputs for x in states)

    def _modes_agree(self) -> bool:
        """Whether tied parameters are stored alike in all modes, unsharded and as shards."""
        modes = self.programs.items()
        return all(
            len({(p.typings[r].slots[i], self._shards[m][r].get(i)) for m, p in modes}) == 1
            for r, facts in enumerate(self._facts)
            for i in facts.tied
        )

    @cached_property
    def changes(self) -> ModeChanges:
        """What it costs where neighbours differ in mode."""
        typings = {mode: program.typings for mode, program in self.programs.items()}
        return mode_changes(self.folded, typings, self.costs, self.reads)

    def _close(self, chain: CandidateChain, incumbent_s: float) -> ClosedChain:
        """Solve a chain for the largest estimate whose program fits; programs are in _priced."""
        bound_s = chain.bound_s
        unlimited = chain.unlimited
        closed = ClosedChain(bound_s, math.inf, 0.0, unlimited.time_s, False)
        if math.isinf(bound_s) or bound_s + self.costs.launch_s >= incumbent_s:
            return closed
        fastest = self.price(chain.assignment(unlimited))
        if fastest.memory.fits:
            return replace(closed, best_s=fastest.time.step_s, gap_before=unlimited.gap_before)
        least, smallest = self._least_of(chain)
        best = smallest
        near_bytes = self.capacity_bytes // BUDGET_STEPS
        budgets = Budgets(chain.estimate_bytes(least), unlimited.memory_bytes - 1, near_bytes)
        too_fast_s = fastest.time.step_s
        budget = budgets.clipped(self.capacity_bytes - chain.least_workspace_bytes)
        end_bytes = self.capacity_bytes
        for _ in range(MAX_ROUNDS if budgets.are_left else 0):
            found = chain.solve(budget, end_bytes)
            if found is None:
                budgets.low_bytes, budget = budget, budgets.above(budget)
                if not budgets.are_left:
                    break
                continue
            closed = replace(
                closed,
                gap_before=max(closed.gap_before, found.gap_before),
                capped=closed.capped or found.capped,
            )
            priced = self.price(chain.assignment(found))
            is_known = priced is best
            at_end = priced.memory.gradients > priced.memory.activations
            if priced.memory.fits:
                budgets.low_bytes, best = budget, min(best, priced, key=order_of)
            elif at_end and chain.end_bytes(found) <= end_bytes:
                working_bytes = priced.memory.peak - chain.end_bytes(found)
                end_bytes = min(chain.end_bytes(found) - 1, self.capacity_bytes - working_bytes)
                continue
            else:
                budgets.lower_high(found.memory_bytes - 1)
                too_fast_s = max(too_fast_s, priced.time.step_s)
            if not budgets.are_left or best.time.step_s <= too_fast_s * (1 + TOLERANCE):
                break
            # A peak at the end says nothing of the start.
            guess = self.capacity_bytes - (priced.memory.peak - found.memory_bytes)
            budget = budgets.next(budgets.middle if at_end else guess, is_known)
        is_far = best.time.step_s > (1 + FAR) * (bound_s + self.costs.launch_s)
        if smallest.memory.fits and (best is smallest or is_far):
            best = min(best, self._grown(chain, least, smallest), key=order_of)
        return replace(closed, best_s=best.time.step_s if best.memory.fits else math.inf)

    def _grown(
        self, chain: CandidateChain, least: Sequence[StrategyCandidate], smallest: Priced
    ) -> Priced:
        """The program of least memory, made faster as far as it fits. least: by region."""
        regions = [i.region for i in self.folded.instances]
        now = [least[r] for r in regions]
        return made_faster(chain.candidates, regions, smallest, now, self.price)

    def _least_of(self, chain: CandidateChain) -> tuple[list[StrategyCandidate], Priced]:
        """The program of a chain with the least memory. Where the estimates' does not fit, but
        nearly, regions change their candidate one by one while that makes the exact peak
        smaller."""
        least, best = min(self._smallest_of(chain), key=lambda pair: pair[1].memory.peak)
        if best.memory.peak > REPAIR_RATIO * self.capacity_bytes:
            return least, best
        return made_smaller(chain.candidates, least, best, self._price_of)

    def _smallest_of(self, chain: CandidateChain) -> list[tuple[list[StrategyCandidate], Priced]]:
        """Programs of a chain one of which has the least memory, with their exact costs."""
        return [(least, self._price_of(least)) for least in chain.smallest()]

    def _price_of(self, candidates: Sequence[StrategyCandidate]) -> Priced:
        """Exact costs of the program that gives every region one candidate."""
        return self.price([candidates[i.region] for i in self.folded.instances])

    # Exact costs.

    def _price(self, assignment: Sequence[StrategyCandidate]) -> Priced:
        split = split_regions(self.folded, [candidate.key for candidate in assignment])
        candidate_of = {
            i.region: candidate for i, candidate in zip(split.instances, assignment, strict=True)
        }
        candidates = tuple(candidate_of[r] for r in range(len(split.regions)))
        typings = [candidate.typing for candidate in candidates]
        prices = [candidate.price for candidate in candidates]
        offloads = [candidate.strategy.offload for candidate in candidates]
        memory, saved_bytes = self.memory_model.step(
            split,
            typings,
            optimizer=self.options.optimizer,
            reserve_bytes=self.reserve_bytes,
            capacity_bytes=self.capacity_bytes,
            offloads=offloads,
            reads=self.reads,
        )
        optimizer = self.options.optimizer
        time = estimate_step(split, typings, prices, self.costs, optimizer, offloads, self.reads)
        return Priced(self.mesh, split, candidates, tuple(prices), time, memory, saved_bytes)
