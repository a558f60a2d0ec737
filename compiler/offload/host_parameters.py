"""Parameters that live in the memory of the host, where the optimizer updates them.

    forward     every page of parameters is copied to the device, in the order of their first use
    backward    a gradient leaves for the host when it is final there: reduced, and the shard of
                this rank; it is added to `.grad` of the host's parameter, and gone on the device
    step        any optimizer of torch, on the host: its states are where the parameters are

(Ren et al. 2021, arXiv:2101.06840.) Pages are copied anew with every forward, whoever has changed
the parameters in the meantime and how. The device has its copies in the dtype that ops read;
masters in a wider one are on the host alone. Of layers that the plan says so of the copies have
memory only while they run (meshfold.offload.layer_copies).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from meshfold.offload.copies import DeviceCopy, pages
from meshfold.offload.host_link import HostLink
from meshfold.offload.layer_copies import LayerCopies
from meshfold.torch_compat.autograd_engine import at_end_of_backward
from meshfold.torch_compat.tensor_subclasses import plain_tensor


class HostParameters:
    """A HostSide (meshfold.zero.host_side). stored: the parameters on the host, by name; shapes are
    all that is read of them here. on_gradient: called with a parameter that was given a gradient.
    """

    def __init__(
        self,
        copies: Sequence[DeviceCopy],
        stored: Mapping[str, Tensor],
        device: torch.device,
        on_gradient: Callable[[str, Tensor], None],
    ) -> None:
        self.link = HostLink(device)
        self._on_gradient = on_gradient
        self._copies = {copy.name: _new(copy, stored[copy.name], device) for copy in copies}
        self._names = {id(copy): name for name, copy in self._copies.items()}
        self._has_one_use = {copy.name for copy in copies if copy.has_one_use}
        by_layer = [c.name for c in copies if c.comes_by_layer and stored[c.name].numel()]
        self.by_layer = LayerCopies(self.link, {name: self._copies[name] for name in by_layer})
        staying = {n: copy.nbytes for n, copy in self._copies.items() if copy not in self.by_layer}
        self._pages = pages(staying)
        self._page_of = {name: k for k, page in enumerate(self._pages) for name in page}
        self._arrivals: dict[int, torch.cuda.Event | None] = {}
        """By page: pages that nobody has waited for yet."""
        self._stored: dict[str, Tensor] = {copy.name: stored[copy.name] for copy in copies}
        self._values: dict[str, Tensor] = {}
        """What is read of them."""
        self._instead: dict[int, Tensor] = {}
        self._versions: dict[str, int] = {}
        """Of what was copied last, as autograd counts changes."""
        self._ends_later = False
        self._is_queued = False
        for copy in copies:
            leaf = self._copies[copy.name]
            if not copy.is_shared:
                leaf.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    partial(self._leave, copy.name)
                )

    @property
    def num_device_bytes(self) -> int:
        """What the copies of a rank take all the time."""
        return sum(c.nbytes for c in self._copies.values() if c not in self.by_layer)

    @property
    def comes_by_layer(self) -> bool:
        return self.has_by_layer(self._copies.values())

    def on_device(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`parameters` with copies on the device for those that are stored on the host, as they are
        now; they are on their way."""
        self._stored = {name: parameters[name] for name in self._copies}
        instead = self._instead
        self._values = {name: instead.get(id(p), p) for name, p in self._stored.items()}
        self.by_layer.begin(self._values)
        with torch.no_grad():
            for k, page in enumerate(self._pages):
                for name in page:
                    self._renew(name)
                self._arrivals[k] = self.link.arrival()
        return {**parameters, **self._copies}

    def has_stored(self, parameter: Tensor) -> bool:
        """Whether a parameter is one of those."""
        return any(parameter is stored for stored in self._stored.values())

    def read_instead(self, values: Mapping[Tensor, Tensor]) -> None:
        """Forwards read these, by stored parameter, while something else updates the parameters."""
        self._instead = {id(parameter): value for parameter, value in values.items()}

    @property
    def is_read_instead(self) -> bool:
        """Whether something may update the parameters beside steps."""
        return bool(self._instead)

    def _renew(self, name: str) -> None:
        """Copy a parameter. A graph of an earlier forward that is still to run backward takes it
        for the same tensor, unless autograd saw the parameter change: then it refuses, as ever."""
        copy, stored = self._copies[name], self._values[name].detach()
        is_same = self._versions.get(name) == stored._version
        self.link.to_device(copy.data if is_same else copy, stored)
        self._versions[name] = stored._version

    # What a step asks (HostSide).

    def has_by_layer(self, shards: Iterable[Tensor]) -> bool:
        return any(shard in self.by_layer for shard in shards)

    def hold(self, now: Iterable[Tensor], ahead: Iterable[Tensor] = ()) -> None:
        self.by_layer.hold(now, ahead)

    def keep(self, tensors: Iterable[Tensor]) -> None:
        self.by_layer.keep(tensors)

    def note(self, tensor: Tensor) -> Callable[[], Tensor] | None:
        return self.by_layer.note(tensor)

    def arrive(self, shard: Tensor) -> None:
        if shard in self.by_layer:
            self.by_layer.arrive(shard)
            return
        page = self._page_of.get(self._names.get(id(shard), ""), -1)
        if page in self._arrivals:
            self.link.wait(self._arrivals.pop(page))

    def takes(self, shard: Tensor) -> bool:
        return self._names.get(id(shard)) in self._has_one_use

    def take(self, shard: Tensor, gradient: Tensor) -> None:
        name = self._names[id(shard)]
        parameter = self._stored[name]
        if not parameter.requires_grad:
            return  # frozen since; its copy has a gradient all the same
        with torch.no_grad():
            if parameter.grad is None:
                parameter.grad = self.link.on_host(gradient)
                self._on_gradient(name, parameter)
            else:
                self.link.add_on_host(parameter.grad.as_subclass(Tensor), gradient)

    def end_backward(self) -> None:
        """The gradients are on the host; under `whole_step` at its end."""
        self._is_queued = False
        self.by_layer.hold(())
        if not self._ends_later:
            self.link.settle()

    # Steps of several backwards.

    @contextmanager
    def whole_step(self) -> Iterator[None]:
        """A context in which all backwards of a step run, with what on_device gave. Gradients are
        added to those of earlier steps at its end, or are as before when it raises."""
        earlier = {name: parameter.grad for name, parameter in self._stored.items()}
        for parameter in self._stored.values():
            parameter.grad = None
        self._ends_later = True
        try:
            yield
            self._collect()
        except BaseException:
            self.link.settle()
            for name, parameter in self._stored.items():
                parameter.grad, self._copies[name].grad = earlier[name], None
            raise
        finally:
            self._ends_later = False
        self.link.settle()
        for name, parameter in self._stored.items():
            gradient, now = earlier[name], parameter.grad
            if gradient is not None:
                parameter.grad = gradient if now is None else gradient.add_(now)

    def _collect(self) -> None:
        """Gradients that were added up with those of other devices leave, too."""
        for copy in self._copies.values():
            if copy.grad is not None:
                self.take(copy, copy.grad)
                copy.grad = None

    def _leave(self, name: str, copy: Tensor) -> None:
        """Autograd has the gradient of a copy: it is final, or was taken before."""
        if copy.grad is None:
            return
        self.take(copy, copy.grad)
        copy.grad = None
        if not self._is_queued:
            self._is_queued = True
            at_end_of_backward(self.end_backward)


def _new(copy: DeviceCopy, stored: Tensor, device: torch.device) -> nn.Parameter:
    """A copy of a parameter, of any value; without memory if it comes by layer."""
    like = plain_tensor(stored.detach())
    found = nn.Parameter(torch.empty_like(like, dtype=copy.dtype, device=device))
    if copy.comes_by_layer:
        found.untyped_storage().resize_(0)
    return found
