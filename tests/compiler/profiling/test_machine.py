"""What a profile is of."""

import os

import pytest
import torch
import torch.distributed as dist

from meshfold.profiling import machine
from meshfold.profiling.machine import device_memory, this_machine


def test_a_process_has_its_share_of_the_memory() -> None:
    cpu = torch.device("cpu")
    one, four = device_memory(cpu, 1), device_memory(cpu, 4)
    assert one.total_bytes // 4 == four.total_bytes
    assert one.reserve_bytes == 0


@pytest.mark.parametrize(("limit", "is_less"), [("1000\n", True), ("max\n", False)])
def test_a_control_group_limits_it(
    tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch, limit: str, is_less: bool
) -> None:
    path = machine.Path(tmp_path) / "memory.max"
    path.write_text(limit)
    monkeypatch.setattr(machine, "_LIMIT", path)
    assert (device_memory(torch.device("cpu"), 1).total_bytes == 1000) is is_less


def test_the_machine_of_a_job() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = this_machine(torch.device("cpu"), "gloo", 1)
    finally:
        dist.destroy_process_group()
    assert (found.device, found.processes, found.per_node) == ("cpu-process", 1, 1)
    assert found.torch == torch.__version__
