"""Predicted memory of one device by component, whose sum is the predicted peak."""

from dataclasses import dataclass

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
            + self.reserve
        )

    @property
    def fits(self) -> bool:
        return self.peak <= self.capacity
