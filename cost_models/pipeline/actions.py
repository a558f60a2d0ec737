"""What a device of a pipeline does, action by action, and its text (orders:
meshfold.cost_models.pipeline.schedules).

    0: 0F0 0F1 0B0 0B1        one line per device
    1: 1F0 1B0 1F1 1B1
"""

from dataclasses import dataclass
from enum import StrEnum


class Pass(StrEnum):
    """What one action computes; the letter stands in the action's text form."""

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT_GRADIENT = "W"


@dataclass(frozen=True, order=True, slots=True)
class StageAction:
    """One pass of a stage over a microbatch; str gives "2F0": stage 2, forward, microbatch 0."""

    stage: int
    kind: Pass
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


ActionLists = tuple[tuple[StageAction, ...], ...]
"""The actions of each device, in the order it runs them."""


def actions_text(actions: ActionLists) -> str:
    """One line per device."""
    return "".join(f"{k}: {' '.join(map(str, device))}\n" for k, device in enumerate(actions))
