"""What a step asks of parameters that are stored in the host's memory (meshfold.offload)."""

from typing import Protocol

from torch import Tensor


class HostSide(Protocol):
    """Parameters of which the device has copies, and where their gradients go."""

    def arrive(self, shard: Tensor) -> None:
        """From here on the device may read the copy."""

    def takes(self, shard: Tensor) -> bool:
        """Whether the gradient of a copy leaves for the host as soon as it is reduced: one use
        makes all of it."""

    def take(self, shard: Tensor, gradient: Tensor) -> None:
        """The gradient of a copy for which `takes`, of this microbatch, reduced."""

    def end_backward(self) -> None:
        """All gradients of this backward were taken."""


class NoHostSide:
    """Everything is stored on the device."""

    def arrive(self, shard: Tensor) -> None: ...

    def takes(self, shard: Tensor) -> bool:
        return False

    def take(self, shard: Tensor, gradient: Tensor) -> None: ...

    def end_backward(self) -> None: ...
