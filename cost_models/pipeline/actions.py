"""What a device of a pipeline does, action by action (orders: meshfold.cost_models.pipeline.schedules)."""

import re
from dataclasses import dataclass
from enum import StrEnum


class Pass(StrEnum):
    """What one action computes; the letter stands in the action's text form."""

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT_GRADIENT = "W"


@dataclass(frozen=True, order=True, slots=True)
class Action:
    """One pass of a stage over a microbatch; str gives "2F0": stage 2, forward, microbatch 0."""

    stage: int
    kind: Pass
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """The action of a text form. Raises ValueError where it is none."""
        found = re.fullmatch(r"(\d+)([FBW])(\d+)", text)
        if found is None:
            raise ValueError(
                f"{text!r} is no action: expected stage, F, B or W, microbatch ('2F0')"
            )
        return cls(int(found[1]), Pass(found[2]), int(found[3]))


ActionLists = tuple[tuple[Action, ...], ...]
"""The actions of each device, in the order it runs them."""
