"""What a step asks of parameters that are stored in the host's memory (meshfold.offload)."""

from collections.abc import Callable, Iterable
from typing import Protocol

from torch import Tensor


class HostSide(Protocol):
    """Parameters of which the device has copies, and where their gradients go."""

    def arrive(self, shard: Tensor) -> None:
        """From here on the device may read the copy."""

    @property
    def comes_by_layer(self) -> bool:
        """Whether copies have memory only while their layer runs."""

    def has_by_layer(self, shards: Iterable[Tensor]) -> bool:
        """Whether there are such copies among these."""

    def hold(self, now: Iterable[Tensor], ahead: Iterable[Tensor] = ()) -> None:
        """Of copies that come by layer the device has these, which come; it waits for those of
        `now`."""

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """These outlive their layer, perhaps on the memory of such a copy."""

    def note(self, tensor: Tensor) -> Callable[[], Tensor] | None:
        """What gives a saved tensor again that is on the memory of such a copy; None: it is not."""

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

    @property
    def comes_by_layer(self) -> bool:
        return False

    def has_by_layer(self, shards: Iterable[Tensor]) -> bool:
        return False

    def hold(self, now: Iterable[Tensor], ahead: Iterable[Tensor] = ()) -> None: ...

    def keep(self, tensors: Iterable[Tensor]) -> None: ...

    def note(self, tensor: Tensor) -> Callable[[], Tensor] | None:
        return None

    def takes(self, shard: Tensor) -> bool:
        return False

    def take(self, shard: Tensor, gradient: Tensor) -> None: ...

    def end_backward(self) -> None: ...
