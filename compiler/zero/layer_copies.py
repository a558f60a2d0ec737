"""When the device has the parameters of which instance, where they come from the host layer by
layer (HostSide)."""

from collections.abc import Sequence

from torch import Tensor

from meshfold.zero.host_side import HostSide


class InstanceCopies:
    """Of one forward and its backward: those of the instance that runs and of the next one that has
    any are on the device. parameters: per instance, all that it reads; none where nothing comes
    so."""

    def __init__(self, host: HostSide, parameters: Sequence[Sequence[Tensor]] = ()) -> None:
        self._host = host
        self._of = parameters if host.comes_by_layer else ()

    @property
    def is_empty(self) -> bool:
        return not self._of

    def enter(self, instance: int, *, is_backward: bool = False) -> None:
        """An instance begins."""
        if self.is_empty:
            return
        n = len(self._of)
        others = reversed(range(instance)) if is_backward else range(instance + 1, n)
        ahead = next((self._of[k] for k in others if self._host.has_by_layer(self._of[k])), ())
        self._host.hold(self._of[instance], ahead)

    def leave_forward(self, is_recording: bool) -> None:
        """The forward is over; the backward of the last instance is next, if there is one."""
        if not self.is_empty:
            self._host.hold(self._of[-1] if is_recording else ())
