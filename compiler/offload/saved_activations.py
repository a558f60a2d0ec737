"""Activations that wait for their backward in the host's memory.

    forward     what autograd saves inside a region leaves when the region's forward is over, while
                the next region runs
    backward    it comes back while the region behind runs backward

(Rhu et al. 2016, arXiv:1602.08124.) What crosses regions, parameters and buffers stay where they
are. Nothing of the last region leaves: its backward is next.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from meshfold.offload.host_link import HostLink

Save = Callable[[Tensor], Tensor | Callable[[], Tensor]]
"""What autograd is to save of a tensor: it, or what makes it again."""


class SavedActivations:
    """Those of one forward and its backward. instances: whose activations leave; save: what a step
    saves of tensors that stay. Nothing here may refer to autograd's graph, which refers to this."""

    def __init__(self, link: HostLink, instances: Collection[int], save: Save) -> None:
        self._link = link
        self._save = save
        self._instances = sorted(instances)
        self._parked: dict[int, list[weakref.ref[_Parked]]] = {}
        """By instance; autograd's graph keeps them alive."""
        self._found: dict[int, _Parked] = {}
        """Of the instance that runs, by address."""

    @contextmanager
    def saving(self, instance: int, stays: Iterable[Tensor]) -> Iterator[None]:
        """While open the instance runs forward, on tensors that stay where they are."""
        if instance not in self._instances:
            yield
            return
        stay = {_address(x) for x in stays}
        with torch.autograd.graph.saved_tensors_hooks(partial(self._pack, stay), _unpack):
            yield

    def leave(self, instance: int, results: Iterable[Tensor]) -> None:
        """The instance has made `results`, which stay; what it has saved beside them leaves."""
        stay = {_address(x) for x in results}
        leaving = [parked for at, parked in self._found.items() if at not in stay]
        for parked in leaving:
            parked.leave()
        if leaving:
            self._parked[instance] = [weakref.ref(parked) for parked in leaving]
        self._found = {}

    def enter(self, instance: int, _: Tensor | None = None) -> None:
        """The backward of an instance begins: what it saved is to be here, and what the nearest
        instance before it saved comes."""
        before = [k for k in self._parked if k < instance]
        for k in (instance, *before[-1:]):
            for ref in self._parked.pop(k, ()):
                if (parked := ref()) is not None:
                    parked.come()

    def _pack(self, stay: Collection[int], tensor: Tensor) -> "Tensor | Callable[[], Tensor]":
        at = _address(tensor)
        if at in stay or not tensor.untyped_storage().nbytes() or tensor.is_conj():
            return self._save(tensor)
        saved = self._save(tensor)
        if not isinstance(saved, Tensor):
            return saved
        parked = self._found.get(at)
        if parked is None:
            parked = self._found[at] = _Parked(self._link, tensor)
        parked.num_readers += 1
        place = int(tensor.storage_offset()), tensor.size(), tensor.stride()
        return partial(_take, parked, tensor.dtype, place)


class _Parked:
    """The memory of one or several saved tensors, as bytes. num_readers: tensors that autograd will
    ask for, once each."""

    def __init__(self, link: HostLink, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self._link = link
        self._here: Tensor | None = empty.set_(storage)
        self._away: Tensor | None = None
        self._arrival: torch.cuda.Event | None = None
        self.num_readers = 0

    def leave(self) -> None:
        assert self._here is not None, "leaves once"
        self._away, self._here = self._link.on_host(self._here), None

    def come(self) -> None:
        if self._here is None:
            assert self._away is not None, "is here or away"
            self._here = self._link.back(self._away)
            self._arrival = self._link.arrival()

    def take(self) -> Tensor:
        """The bytes, for one reader."""
        self.come()
        self._link.wait(self._arrival)
        found, self._arrival = self._here, None
        assert found is not None, "has come"
        self.num_readers -= 1
        if not self.num_readers:
            self._here = self._away = None
        return found


def _take(
    parked: _Parked, dtype: torch.dtype, place: tuple[int, torch.Size, tuple[int, ...]]
) -> Tensor:
    found = parked.take()
    empty = torch.empty(0, dtype=dtype, device=found.device)
    return empty.set_(found.untyped_storage(), *place)


def _unpack(saved: "Tensor | Callable[[], Tensor]") -> Tensor:
    return saved if isinstance(saved, Tensor) else saved()


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
