"""Why a plan does not keep certain pins: the best plan that does, beside it, and what would have to
change for that one to win."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from meshfold.api import check_fingerprint
from meshfold.errors import InfeasibleError, OptionError
from meshfold.ir.options import CompileOptions, PinValue
from meshfold.ir.plan import Plan
from meshfold.models.from_argument import accepted_sizes, is_configuration, sequence_length
from meshfold.passes.one_pass.pins import keeps_pins, pinned_values
from meshfold.report.why_not import WhyNot
from meshfold.studies.captured_models import CapturedModels
from meshfold.studies.changes import World, changes
from meshfold.studies.step_parts import parts_of_both

Tell = Callable[[str], None]
"""Called with what is planned next."""

UNLIMITED_BYTES = 2**60


def options_of(plan: Plan) -> CompileOptions:
    """What to ask for to plan like `plan`; custom rules come with the model."""
    returns = plan.model.returns
    strategies = [region.strategy for region in plan.regions]
    return CompileOptions(
        memory_bytes=plan.memory.capacity,
        pins=plan.pins,
        optimizer=plan.optimizer,
        seed=plan.seed,
        precision=plan.precision,
        mode=plan.asked_mode,
        allow_offload=any(strategy.offload != "none" for strategy in strategies),
        loss=returns.loss or None,
        outputs=returns.outputs,
        sharded_outputs=returns.sharded,
    )


def why_not(
    plan: Plan, model: str, pins: Mapping[str, PinValue], tell: Tell = lambda _: None
) -> WhyNot:
    """The answer for a plan of MODEL. Raises PlanMismatchError for another model, OptionError for a
    pin that does not exist."""
    replace(options_of(plan), pins=pins)  # refuses pins that are none
    asked = _Asked(plan, model, pins)
    text = ", ".join(f"{name}={value}" for name, value in pins.items())
    if asked.is_kept:
        return WhyNot(text, plan, plan, None, is_kept=True)
    asked.check_model()
    tell(f"planning with {text}")
    pinned, refusal = asked.plan_or_reason(asked.world, True)
    tell(f"planning with {text} in any memory")
    free, _ = asked.plan_or_reason(replace(asked.world, memory_bytes=UNLIMITED_BYTES), True)
    if free is not None and free.memory.peak <= plan.memory.capacity:
        free = None
    parts = None if pinned is None else parts_of_both(plan, pinned)
    answer = WhyNot(text, plan, pinned, parts, refusal, free)
    is_faster = parts is not None and parts[1].step_s < parts[0].step_s
    if is_faster or pinned is free is None:
        return answer  # nothing has to change, or a rule forbids it on any cluster
    if plan.mode != "eager":
        note = "what would have to change is answered for plans in mode eager alone"
        return replace(answer, notes=(note,))
    tell(f"looking for what would have to change for {text}")
    found = changes(asked.world, parts, asked.plan_in, asked.has_batch)
    return replace(answer, changes=tuple(found))


class _Asked:
    """A plan, its MODEL and pins, and the plans that are made for them."""

    def __init__(self, plan: Plan, model: str, pins: Mapping[str, PinValue]) -> None:
        self._plan, self._pins = plan, pins
        self._options = options_of(plan)
        self._models = CapturedModels(model, plan.model.batch_size)
        self._accepted = ("batch", "seq") if is_configuration(model) else accepted_sizes(model)
        self.world = World(plan.cluster, plan.memory.capacity, plan.model.batch_size)

    @property
    def has_batch(self) -> bool:
        """Whether MODEL can be asked for another batch."""
        return "batch" in self._accepted

    @property
    def is_kept(self) -> bool:
        """Whether every layer of the plan keeps the pins already, as far as strategies say."""
        known = pinned_values(self._plan.strategy).keys() - {"schedule", "virtual_stages"}
        strategies = (self._plan.strategy, *(region.strategy for region in self._plan.regions))
        return self._pins.keys() <= known and all(keeps_pins(s, self._pins) for s in strategies)

    def check_model(self) -> None:
        """Raises PlanMismatchError unless the plan was made for MODEL."""
        batch, sequence = self._sizes(self.world.batch)
        captured = self._models.captured(self._options, batch=batch, sequence=sequence)
        check_fingerprint(self._plan, captured)

    def plan_or_reason(self, world: World, pinned: bool) -> tuple[Plan | None, str]:
        """The best plan, with the pins or without, or why there is none."""
        pins = {**self._options.pins, **(self._pins if pinned else {})}
        options = replace(self._options, pins=pins, memory_bytes=world.memory_bytes)
        batch, sequence = self._sizes(world.batch)
        try:
            made = self._models.plan(world.cluster, options, batch=batch, sequence=sequence)
        except (InfeasibleError, OptionError) as error:
            return None, str(error)
        return made, ""

    def plan_in(self, world: World, pinned: bool) -> Plan | None:
        """The same without the reason."""
        return self.plan_or_reason(world, pinned)[0]

    def _sizes(self, batch: int) -> tuple[int | None, int | None]:
        """Batch and sequence of example inputs, as far as MODEL can be asked for them."""
        sizes = {"batch": batch, "seq": sequence_length(self._plan)}
        given = {name: size for name, size in sizes.items() if name in self._accepted}
        return given.get("batch"), given.get("seq")
