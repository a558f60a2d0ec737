"""Live ranges of one region's local program: a forward, then its backward in reverse.

A step's tensors live on storages; a storage is freed when nothing refers to it any more:

    1. forward: a value goes after its last use, unless autograd keeps it or it leaves the region
    2. backward in reverse order: after a step ran, what it saved and its incoming gradients go; the
       gradient of a view or an add lives in the incoming one's storage
    3. a second gradient for a value is added into the older buffer if nothing else refers to that,
       else into the newer one, else into a third
    4. gradients of slots stay to the end of the region: they leave it; those that are added to
       gradients of earlier microbatches go at once
    5. with recomputation the forward saves the slots, and under selective recomputation results of
       the kept steps; when the backward first needs something from inside, what is missing is
       recomputed (cost_models/memory/recomputation.py) while the gradients so far are alive; then
       as above

(Rules and their measured errors: PyTorch's engine, torch/csrc/autograd/input_buffer.cpp; held
against the CPU allocator's events in tests/passes/memory/test_region.py.)

Storages that come from outside through slots are not counted here: whoever made them counts them.
Sizes are bytes of one rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshfold.cost_models.memory.heap import Heap
from meshfold.cost_models.memory.op_memory import NEW_STORAGE, NO_GRADIENT, TensorSpec
from meshfold.cost_models.memory.put_off_bytes import HeldProducts, PutOffBytes, PutOffFactors
from meshfold.cost_models.memory.recomputation import (
    LocalStep,
    RecomputePlan,
    keeps,
    plan_recompute,
)


@dataclass(frozen=True)
class LocalProgram:
    """What one rank runs for a region."""

    num_slots: int
    """Tensors 0..num_slots-1 come from outside."""
    specs: tuple[TensorSpec, ...]
    steps: tuple[LocalStep, ...]
    outputs: tuple[int, ...]
    grouped: frozenset[int] = frozenset()
    """Tensors from outside whose gradients are reduced together, as soon as the backward of the
    first step that reads one is done."""
    recomputes: bool = False
    """Whether the results of steps that are not kept are recomputed in the backward."""
    kept: frozenset[int] | None = None
    """The steps that are kept then; None for full recomputation."""
    added_at_once: frozenset[int] = frozenset()
    """Tensors from outside whose gradients are added to those of earlier microbatches as soon as
    the backward of the first step that reads one is done, and are gone then."""
    put_off: Mapping[int, PutOffFactors] = field(default_factory=dict)
    """Steps whose backward leaves gradients for later."""
    waiting: frozenset[int] = frozenset()
    """Tensors from outside whose gradients wait for what is put off."""


@dataclass(frozen=True)
class RegionMemory:
    """Memory of one instance of a region.

    saved_bytes: saved for the backward, made inside and not leaving the region.
    saved_slots: slots whose storage the backward needs.
    output_roots: whose storage each output lives on: output j's (j, its own or an earlier one), or
        that of slot k (-1 - k).
    output_bytes: bytes of each output's storage if it is its own, else 0.
    saved_outputs: whether this region's own backward needs the output's storage.
    forward_peak_bytes: worst moment of the forward, everything made inside and not yet freed.
    backward_peak_bytes: worst moment of the backward: what is saved or recomputed, gradients
        coming in, made, and leaving; storages of slots and outputs not included.
    reduction_bytes: alive when the gradients of grouped tensors are all there, these included.
    done_slots: saved slots that no step needs any more by then.
    slot_gradient_bytes: of each slot, 0 where there is none.
    slot_gradient_roots: of each slot the first one whose gradient is in the same storage; empty
        where each has its own.
    """

    saved_bytes: int
    saved_slots: frozenset[int]
    output_roots: tuple[int, ...]
    output_bytes: tuple[int, ...]
    saved_outputs: tuple[bool, ...]
    forward_peak_bytes: int
    backward_peak_bytes: int
    reduction_bytes: int
    slot_gradient_bytes: tuple[int, ...]
    done_slots: frozenset[int] = frozenset()
    slot_gradient_roots: tuple[int, ...] = ()


@dataclass(frozen=True)
class RegionTrace:
    """The same over time, per step of the local program; bytes are counted as in RegionMemory."""

    memory: RegionMemory
    forward_bytes: tuple[int, ...]
    """Bytes at the worst moment of each step's forward."""
    backward_bytes: tuple[int, ...]
    """Bytes at the worst moment of each step's backward."""
    after_bytes: tuple[int, ...]
    """When each step's backward is done."""
    needs: tuple[frozenset[int], ...]
    """Slots whose storage autograd keeps for each step's backward."""
    recomputed: frozenset[int]
    """Steps that run a second time."""
    recompute_at: int
    """The step before whose backward they run; -1 for none."""
    recompute_bytes: int
    """The worst moment of that."""
    put_off: PutOffBytes


def simulate_region(program: LocalProgram) -> RegionMemory:
    """Memory of one instance of `program`. Linear in its steps."""
    return _Simulation(program).run()


def trace_region(program: LocalProgram) -> RegionTrace:
    """Memory of one instance over time. Linear in its steps."""
    simulation = _Simulation(program)
    memory = simulation.run()
    recompute = simulation.recompute
    return RegionTrace(
        memory,
        tuple(simulation.forward_bytes),
        tuple(simulation.backward_bytes),
        tuple(simulation.after_bytes),
        tuple(simulation.needs),
        recompute.steps if recompute is not None and simulation.recompute_at >= 0 else frozenset(),
        simulation.recompute_at,
        simulation.recompute_bytes,
        simulation.put_off(),
    )


class _Simulation:
    def __init__(self, program: LocalProgram) -> None:
        self.program = program
        self.heap = Heap()
        # Storages of slots are counted elsewhere: size 0 here, and an owner that never releases.
        self.storage = [self.heap.allocate(0) for _ in range(program.num_slots)]
        self.storage += [-1] * (len(program.specs) - program.num_slots)
        self.last_use = _last_uses(program)
        self.first_use = {
            t: k for k in reversed(range(len(program.steps))) for t in program.steps[k].operands
        }
        self.recompute: RecomputePlan | None = None
        if program.recomputes:
            recompute = plan_recompute(program.steps, program.num_slots, program.kept)
            self.recompute = recompute if recompute.waiting else None
        self.saved: list[list[int]] = [[] for _ in program.steps]
        self.gradient: list[int] = [-1] * len(program.specs)
        self.reduction_bytes = 0
        self.reduction_at = 0
        self.forward_bytes: list[int] = []
        self.backward_bytes = [0] * len(program.steps)
        self.after_bytes = [0] * len(program.steps)
        self.needs: list[frozenset[int]] = []
        self.recompute_at = -1
        self.recompute_bytes = 0
        self.held = HeldProducts()

    def put_off(self) -> PutOffBytes:
        """What is put off, after the backward."""
        waiting = {self.gradient[t] for t in self.program.waiting if self.gradient[t] >= 0}
        return self.held.with_waiting(sum(self.heap.sizes[s] for s in waiting))

    def run(self) -> RegionMemory:
        self._forward()
        heap, num_slots = self.heap, self.program.num_slots
        slots = self.storage[:num_slots]
        outputs = [self.storage[t] for t in self.program.outputs]
        saved = {s for storages in self.saved for s in storages}
        if self.recompute is not None:
            saved.update(self.storage[t] for t in self.recompute.saved)
        roots = tuple(-1 - slots.index(s) if s in slots else outputs.index(s) for s in outputs)
        output_bytes = tuple(
            heap.sizes[s] if root == j else 0
            for j, (s, root) in enumerate(zip(outputs, roots, strict=True))
        )
        # From here on compose_step counts the outputs' storages.
        for s in set(outputs):
            heap.resize(s, 0)
        heap.peak_bytes = saved_bytes = heap.current_bytes
        self._backward()
        gradients = [heap.sizes[g] if g >= 0 else 0 for g in self.gradient[:num_slots]]
        return RegionMemory(
            saved_bytes=saved_bytes,
            saved_slots=frozenset(k for k, s in enumerate(slots) if s in saved),
            output_roots=roots,
            output_bytes=output_bytes,
            saved_outputs=tuple(s in saved for s in outputs),
            forward_peak_bytes=max(self.forward_bytes, default=0),
            backward_peak_bytes=max(
                saved_bytes, self.recompute_bytes, *self.backward_bytes, heap.peak_bytes
            ),
            reduction_bytes=self.reduction_bytes,
            slot_gradient_bytes=tuple(gradients),
            done_slots=self._done_slots(),
            slot_gradient_roots=self._slot_gradient_roots(num_slots),
        )

    def _slot_gradient_roots(self, num_slots: int) -> tuple[int, ...]:
        storages = self.gradient[:num_slots]
        roots = [storages.index(g) if g >= 0 else k for k, g in enumerate(storages)]
        return () if roots == [*range(num_slots)] else tuple(roots)

    def _done_slots(self) -> frozenset[int]:
        """What recomputation started from it holds until the gradients of the region are there."""
        of_all: frozenset[int] = frozenset().union(*self.needs)
        if self.recompute is not None:
            return of_all.union(t for t in self.recompute.saved if t < self.program.num_slots)
        return of_all.difference(*self.needs[: self.reduction_at])

    # Forward.

    def _forward(self) -> None:
        for k, step in enumerate(self.program.steps):
            saved = self._run_forward(step)
            if self.recompute is not None:
                saved = self._save(k, saved, self.recompute)
            self.saved[k] = saved
            self.needs.append(frozenset(s for s in saved if s < self.program.num_slots))
            self.forward_bytes.append(self.heap.take_peak())
            self._release_dead(step, k)

    def _save(self, k: int, saved: list[int], recompute: RecomputePlan) -> list[int]:
        """Drop what autograd would keep of step k and is recomputed; the values that are saved for
        that get an owner."""
        step = self.program.steps[k]
        is_kept = self.program.kept is not None and k in self.program.kept
        inside = saved[-1:] if is_kept and step.probe.saved_bytes else []
        self._release_all(saved[: len(saved) - len(inside)])
        for t in step.outputs:
            if t in recompute.saved:
                self.heap.retain(self.storage[t])
        return inside

    def _recompute(self, recompute: RecomputePlan, at: int) -> None:
        """Before the backward of step `at`, compute what is missing, note what the steps up to it
        need, and drop the rest."""
        for k, step in enumerate(self.program.steps):
            noted: list[int] = []
            if k in recompute.steps:
                noted = self._run_forward(step)
            elif k <= at and keeps(step.probe):
                noted = self._saved_values(step)
                for s in noted:
                    self.heap.retain(s)
            if k <= at:
                self.saved[k] += noted
            else:
                self._release_all(noted)
            self._release_all([self.storage[t] for t in recompute.released[k]])
        self._release_all([self.storage[t] for t in recompute.released[-1]])

    def _run_forward(self, step: LocalStep) -> list[int]:
        """Make the step's results; returns the storages that autograd saves, retained."""
        heap, probe = self.heap, step.probe
        made_bytes = sum(o.num_bytes for o in probe.outputs) + probe.saved_bytes
        heap.touch(made_bytes + probe.forward_scratch_bytes)
        for t, output in zip(step.outputs, probe.outputs, strict=True):
            if output.storage == NEW_STORAGE:
                self.storage[t] = heap.allocate(output.num_bytes)
            else:
                self.storage[t] = self.storage[step.operands[output.storage]]
                heap.retain(self.storage[t])
        saved = self._saved_values(step)
        for s in saved:
            heap.retain(s)
        if probe.saved_bytes:
            saved.append(heap.allocate(probe.saved_bytes))
        return saved

    def _saved_values(self, step: LocalStep) -> list[int]:
        """Storages of operands and results that autograd saves."""
        saved = [self.storage[step.operands[k]] for k in step.probe.saved_operands]
        return saved + [self.storage[step.outputs[j]] for j in step.probe.saved_outputs]

    def _release_dead(self, step: LocalStep, k: int) -> None:
        """Release the values of step k that nobody reads later."""
        values = dict.fromkeys((*step.operands, *step.outputs))
        dead = [t for t in values if self.last_use[t] <= k and t >= self.program.num_slots]
        self._release_all([self.storage[t] for t in dead])

    def _release_all(self, storages: Sequence[int]) -> None:
        for s in storages:
            self.heap.release(s)

    # Backward.

    def _backward(self) -> None:
        for t in self.program.outputs:
            if self.program.specs[t].requires_grad:
                self._receive(t, self.heap.allocate(self.program.specs[t].num_bytes))
        missing = self.recompute
        for k in reversed(range(len(self.program.steps))):
            step = self.program.steps[k]
            if any(self.gradient[t] >= 0 for t in step.outputs):
                if missing is not None and k in missing.waiting:
                    self._recompute(missing, k)
                    missing = None
                    self.recompute_at, self.recompute_bytes = k, self.heap.take_peak()
                self._run_backward(step, self.program.put_off.get(k))
            self.backward_bytes[k] = self.heap.take_peak()
            self._release_all(self.saved[k])
            self._add_gradients(k)
            self.after_bytes[k] = self.heap.current_bytes
            if not self.program.grouped.isdisjoint(step.operands):
                # The last time this happens counts: the first step that reads one.
                self.reduction_bytes, self.reduction_at = self.heap.current_bytes, k

    def _add_gradients(self, k: int) -> None:
        """Add gradients that no step before k adds anything to to those that are there."""
        for t in self.program.added_at_once.intersection(self.program.steps[k].operands):
            if self.first_use[t] == k and self.gradient[t] >= 0:
                self.heap.release(self.gradient[t])

    def _put_off(self, step: LocalStep, factors: PutOffFactors) -> None:
        """Hold what their gradients need: the other factors and the gradients that come in."""
        read = [step.operands[k] for k in factors.others]
        kept = [(t, self.storage[t]) for t in read]
        kept += [(t, self.gradient[t]) for t in step.outputs if self.gradient[t] >= 0]
        # What leaves the region or comes from outside has no bytes here.
        specs = self.program.specs
        held = {s: self.heap.sizes[s] or specs[t].num_bytes for t, s in kept}
        made = sum(specs[step.operands[k]].num_bytes for k in factors.weights)
        for s in self.held.add(made, held, step.probe.backward_scratch_bytes):
            self.heap.retain(s)

    def _run_backward(self, step: LocalStep, factors: PutOffFactors | None) -> None:
        heap, probe = self.heap, step.probe
        incoming = [self.gradient[t] for t in step.outputs]
        sizes = list(probe.fresh_gradient_bytes)
        put_off: Sequence[int] = ()
        if factors is not None:
            put_off = factors.weights
            self._put_off(step, factors)
            for k in put_off:
                if (number := probe.gradients[k] - len(incoming)) >= 0:
                    sizes[number] = 0
        heap.touch(sum(sizes) + probe.backward_scratch_bytes)
        fresh = [heap.allocate(size) for size in sizes]
        sources = [*incoming, *fresh]
        given = []
        for k, (t, source) in enumerate(zip(step.operands, probe.gradients, strict=False)):
            if source != NO_GRADIENT and sources[source] >= 0 and k not in put_off:
                heap.retain(sources[source])
                given.append((t, sources[source]))
        for s in fresh:
            heap.release(s)
        for t, s in zip(step.outputs, incoming, strict=True):
            if s >= 0:
                heap.release(s)
                self.gradient[t] = -1
        for t, s in given:
            self._receive(t, s)

    def _receive(self, t: int, newer: int) -> None:
        """Add the gradient on storage `newer`, whose reference is handed over, to tensor t's."""
        heap, older = self.heap, self.gradient[t]
        if older < 0:
            self.gradient[t] = newer
        elif heap.owners[older] == 1:
            heap.release(newer)
        elif heap.owners[newer] == 1:
            heap.release(older)
            self.gradient[t] = newer
        else:
            self.gradient[t] = heap.allocate(self.program.specs[t].num_bytes)
            heap.release(older)
            heap.release(newer)


def _last_uses(program: LocalProgram) -> list[int]:
    """The last step that reads or computes each tensor; past the end for an output."""
    last = [-1] * len(program.specs)
    for k, step in enumerate(program.steps):
        for t in (*step.operands, *step.outputs):
            last[t] = k
    for t in program.outputs:
        last[t] = len(program.steps)
    return last
