"""What the processes of tests of process groups run."""

import os
import socket
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshfold
from meshfold.distributed.local_processes import Report
from meshfold.distributed.rank_mesh import ProcessMesh, process_mesh
from meshfold.ir.mesh import Mesh
from meshfold.torch_compat.process_groups import default_timeout

WAITS_S = 1.0


def listening_hosts(mesh: Mesh) -> set[str]:
    """Addresses on which this process listens, with groups of a mesh."""
    made = process_mesh(mesh, torch.device("cpu"))
    made.wait(made.start_all_reduce(torch.ones(2), (mesh.names[0],)))
    descriptors = Path("/proc/self/fd").iterdir()
    own = {os.readlink(d) for d in descriptors if os.path.lexists(d)}
    found = set()
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]:
            local, state, inode = (line.split()[k] for k in (1, 3, 9))
            if state == "0A" and f"socket:[{inode}]" in own:
                words = bytes.fromhex(local.split(":")[0])
                raw = b"".join(words[k : k + 4][::-1] for k in range(0, len(words), 4))
                found.add(socket.inet_ntop(family, raw))
    made.close()
    return found


def timeouts(mesh: Mesh) -> tuple[float, list[float]]:
    """Seconds of the default group; of a group of a mesh: at first, in a step that is given
    another timeout, in the next."""
    made = process_mesh(mesh, torch.device("cpu"))
    found = []
    for given in (None, 7.0, None):
        made.begin_step(0, given)
        found.append(_timeout_s(made, mesh.names[0]))
    made.close()
    return default_timeout().total_seconds(), found


def _timeout_s(made: ProcessMesh, axis: str) -> float:
    backend: Any = made.group((axis,))._get_backend(made.device)
    seconds: float = backend.options._timeout.total_seconds()
    return seconds


def wait_for_a_rank_that_stays_away(mesh: Mesh, kind: str) -> str:
    """What rank 0 says; the others start no collective."""
    made = process_mesh(mesh, torch.device("cpu"))
    made.begin_step(4, WAITS_S)
    made.place.enter("C")
    if made.rank:
        time.sleep(3 * WAITS_S)
        return ""
    x = torch.ones(2 * made.size(mesh.names))
    try:
        made.wait(getattr(made, f"start_{kind}")(x, mesh.names))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nobody was missed"


def say_process_id(report: Report) -> None:
    """Report it, and stay: rank 0 busy, the others waiting for it."""
    report(os.getpid())
    if dist.get_rank():
        dist.barrier()
    time.sleep(600.0)


class Contrastive(nn.Module):
    """Gathers its embeddings over the ranks by itself, as CLIPs do, and synchronises statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 16), nn.Linear(8, 16)
        self.norm = nn.SyncBatchNorm(16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = self.norm(self.left(x)), self.right(y)
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            parts = [torch.empty_like(b) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, b)
            b = torch.cat(parts)
        return nn.functional.cross_entropy(a @ b.T, torch.arange(len(a)))


def contrastive(rows: int = 8) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model in float64 and its batch, the same on all ranks."""
    torch.manual_seed(0)
    x, y = torch.randn((2, rows, 8), dtype=torch.float64)
    return Contrastive().double(), {"x": x, "y": y}


def contrastive_losses(pins: dict[str, Any]) -> list[float]:
    """Of three steps, and whether the default group is there behind them."""
    model, batch = contrastive()
    options = meshfold.CompileOptions(pins={"microbatches": 1, **pins})
    compiled = meshfold.compile(model, f"local-cpux{dist.get_world_size()}", batch, options=options)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        losses.append(float(compiled.train_step(batch)))
        optimizer.step()
        optimizer.zero_grad()
    compiled.close()
    assert dist.is_initialized()
    return losses
