"""What is beyond one rank, for measuring its memory alone: a host, and other stages."""

import torch
from torch import Tensor, nn

from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.offload.copies import device_copies
from meshfold.offload.host_link import HostLink
from meshfold.runtime.stage_p2p import Shapes
from meshfold.torch_compat.dtypes import torch_dtype
from meshfold.zero.host_side import NoHostSide


class Far(NoHostSide):
    """A host that is out of sight: what it takes is gone. order: of the parameters that it took."""

    def __init__(self, program: EmittedProgram, parameters: dict[str, nn.Parameter]) -> None:
        copies = device_copies([program], parameters, ())
        self.names = {id(parameters[c.name]): c.name for c in copies if c.has_one_use}
        self.order: list[str] = []
        for copy in copies:
            parameters[copy.name].register_post_accumulate_grad_hook(self._leave)

    def takes(self, shard: Tensor) -> bool:
        return id(shard) in self.names

    def take(self, shard: Tensor, gradient: Tensor) -> None:
        self.order.append(self.names[id(shard)])

    def _leave(self, parameter: Tensor) -> None:
        if parameter.grad is not None and self.takes(parameter):
            self.take(parameter, parameter.grad)
        parameter.grad = None


class FarLink(HostLink):
    """Its host is out of sight, too. sizes: of what is away, by what stands for it."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.sizes: dict[int, int] = {}
        self.away: list[Tensor] = []

    def on_host(self, source: Tensor) -> Tensor:
        self.away.append(torch.empty(0, dtype=source.dtype))
        self.sizes[id(self.away[-1])] = source.numel()
        return self.away[-1]

    def back(self, source: Tensor) -> Tensor:
        return torch.zeros(self.sizes[id(source)], dtype=source.dtype)


class NoPeers:
    """Links to other stages that send zeros, and keep what is sent to them until the next message
    either way (StageLinks)."""

    sent: object = None

    def receive(self, device: int, action: object, number: int, shapes: Shapes) -> "NoPeers":
        self.sent = None
        received = NoPeers()
        received.values = [torch.zeros(s, dtype=torch_dtype(dtype)) for s, dtype in shapes]
        return received

    def wait(self, *who: object) -> list[torch.Tensor]:
        return self.values

    def send(self, *message: object) -> None:
        self.sent = message

    def finish(self, action: object) -> None:
        self.sent = None

    def broadcast(self, value: torch.Tensor, device: int) -> torch.Tensor:
        return value
