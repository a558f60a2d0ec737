"""Classes that stand in for those of child modules."""

from typing import Any

from torch import nn

from meshfold.capture.python_state.class_writes import writes_to


class Wrapping:
    """Gives every subclass a forward that calls its own, as transformers' checkpointed layers."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = cls.forward  # type: ignore[attr-defined]
        cls.forward = lambda self, *args: own(self, *args)  # type: ignore[attr-defined]


class Wrapped(Wrapping, nn.Linear):
    """A layer whose class is written to when a subclass is made."""


def test_what_a_class_writes_to_its_subclasses_stays_there() -> None:
    before = vars(Wrapped)["forward"]

    class StandIn(Wrapped, metaclass=writes_to(Wrapped)):  # type: ignore[misc, metaclass]
        pass

    assert vars(Wrapped)["forward"] is before and vars(StandIn)["forward"] is not before
    StandIn.steps = 3
    assert Wrapped.steps == 3  # type: ignore[attr-defined]
    del StandIn.steps
    assert not hasattr(Wrapped, "steps")
