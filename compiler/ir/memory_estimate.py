"""Predicted memory of one device by component, whose sum is the predicted peak."""

from dataclasses import dataclass, replace

from meshfold.ir.limits import Bytes


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes per device at the moment of the peak, by component."""

    parameters: Bytes
    gradients: Bytes
    optimizer: Bytes
    activations: Bytes
    gathered_parameters: Bytes
    buckets: Bytes
    transient: Bytes
    reserve: Bytes
    capacity: Bytes
    """The budget."""
    loss: Bytes = 0
    """Where the peak is inside the layer that computes the loss, what that keeps and works with
    (logits and their gradients); it is not among activations and transient."""
    emitted: Bytes = 0
    """What the program as emitted has at its peak beyond the other components: buckets of several
    groups, parameters gathered further ahead, gradients of weights that are put off."""

    @property
    def peak(self) -> Bytes:
        return (
            self.parameters
            + self.gradients
            + self.optimizer
            + self.activations
            + self.gathered_parameters
            + self.buckets
            + self.transient
            + self.loss
            + self.emitted
            + self.reserve
        )

    @property
    def fits(self) -> bool:
        return self.peak <= self.capacity

    @property
    def left(self) -> Bytes:
        """What the other components than `emitted` leave of the budget."""
        return max(0, self.capacity - (self.peak - self.emitted))

    def of_program(self, peak_bytes: int) -> "MemoryEstimate":
        """The same with `emitted` so that no program with that peak has more. What its components
        add up to without stays, where that is more: sums of gradients are in no event."""
        return replace(self, emitted=max(0, peak_bytes - (self.peak - self.emitted)))
