"""Device copies of parameters that have memory only while the layer that reads them runs.

    forward     a layer's parameters come while the layer before runs, and are freed behind it
    backward    they come again while the layer behind runs its backward

(Nie et al. 2023, arXiv:2303.02868; Rajbhandari et al. 2021, arXiv:2104.07857.) A copy is one tensor
for as long as there is the model; its storage has bytes or none. Autograd saves notes instead of
what is on such a storage: whoever asks late finds it there again.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from meshfold.errors import MeshfoldError
from meshfold.offload.host_link import HostLink

CHANGED = (
    "parameter {name} was changed between forward and backward, and the backward reads it again "
    "from the host's memory; update parameters after backward"
)


class LayerCopies:
    """The copies of one rank. copies: by name, without memory, none of them empty."""

    def __init__(self, link: HostLink, copies: Mapping[str, Tensor]) -> None:
        self._link = link
        self._copies = {id(copy): (name, copy) for name, copy in copies.items()}
        self._sizes = {id(copy): copy.nbytes for copy in copies.values()}
        self._stored: Mapping[str, Tensor] = {}
        self._arrivals: dict[int, torch.cuda.Event | None] = {}
        """Of those that are here, by identity; None: it was waited for."""
        self._at: dict[int, int] = {}
        """Address -> identity, of those that are here."""
        self._kept: set[int] = set()
        """What others refer to without a note."""

    def __contains__(self, copy: Tensor) -> bool:
        return id(copy) in self._copies

    @property
    def num_bytes(self) -> int:
        """Of those that are here."""
        return sum(self._sizes[key] for key in self._arrivals)

    def begin(self, stored: Mapping[str, Tensor]) -> None:
        """A forward begins, with these parameters: nothing is here but what others refer to, which
        is renewed."""
        self.hold(())
        self._stored = stored
        self._arrivals.clear()
        self._bring([self._copies[key][1] for key in self._kept])

    def hold(self, now: Iterable[Tensor], ahead: Iterable[Tensor] = ()) -> None:
        """Free all copies but these, which come; the device waits for those of `now`."""
        now = [copy for copy in now if copy in self]
        wanted = [*now, *(copy for copy in ahead if copy in self)]
        for key in self._arrivals.keys() - set(map(id, wanted)) - self._kept:
            self._free(key)
        self._bring(now)
        self._bring(wanted)
        for copy in now:
            self.arrive(copy)

    def arrive(self, copy: Tensor) -> None:
        """From here on the device may read the copy."""
        self._bring([copy])
        self._link.wait(self._arrivals[id(copy)])
        self._arrivals[id(copy)] = None

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """These outlive the layer: a copy whose memory they are stays from here on."""
        for tensor in tensors:
            key = self._at.get(tensor.untyped_storage().data_ptr())
            if key is not None:
                self._kept.add(key)

    def note(self, tensor: Tensor) -> Callable[[], Tensor] | None:
        """What brings a saved tensor back that is on the memory of a copy. None for another."""
        key = self._at.get(tensor.untyped_storage().data_ptr())
        if key is None:
            return None
        name, copy = self._copies[key]
        if tensor.dtype != copy.dtype:
            self._kept.add(key)
            return None
        stored = self._stored[name]
        version = stored._version
        place = tensor.size(), tensor.stride(), int(tensor.storage_offset())

        def again() -> Tensor:
            if stored._version != version:
                raise MeshfoldError(CHANGED.format(name=name))
            self.arrive(copy)
            return copy.detach().as_strided(*place)

        return again

    def _bring(self, copies: Iterable[Tensor]) -> None:
        coming = [copy for copy in copies if id(copy) not in self._arrivals]
        with torch.no_grad():
            for copy in coming:
                name, _ = self._copies[id(copy)]
                copy.untyped_storage().resize_(self._sizes[id(copy)])
                self._at[copy.untyped_storage().data_ptr()] = id(copy)
                self._link.to_device(copy.data, self._stored[name].detach())
        arrival = self._link.arrival() if coming else None
        self._arrivals.update((id(copy), arrival) for copy in coming)

    def _free(self, key: int) -> None:
        # Nobody may write to memory that was given back.
        self._link.wait(self._arrivals.pop(key))
        storage = self._copies[key][1].untyped_storage()
        del self._at[storage.data_ptr()]
        storage.resize_(0)
