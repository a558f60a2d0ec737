"""What a profile is of: device, processes, cores, memory."""

import os
from pathlib import Path

import torch
import torch.distributed as dist

from meshfold.cost_models.calibration.points import Machine, Memory
from meshfold.cost_models.hardware.shared_cores import usable_cores

CPU_DEVICE = "cpu-process"
_LIMIT = Path("/sys/fs/cgroup/memory.max")
HOST_BYTES = 2**26
"""Of the copies between a device and its host."""


def this_machine(device: torch.device, backend: str, per_node: int) -> Machine:
    """Of all processes of this job, of which this is one."""
    is_cuda = device.type == "cuda"
    return Machine(
        device=torch.cuda.get_device_name(device) if is_cuda else CPU_DEVICE,
        backend=backend,
        processes=dist.get_world_size(),
        per_node=per_node,
        cores=usable_cores(),
        torch=torch.__version__,
    )


def device_memory(device: torch.device, per_node: int) -> Memory:
    """Of a device, after collectives; of a process on the CPU its share of the node's."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return Memory(total, total - free)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        total = min(total, int(_LIMIT.read_text("ascii")))
    except (OSError, ValueError):  # no control groups, or no limit: "max"
        pass
    return Memory(max(total // per_node, 1), 0)
