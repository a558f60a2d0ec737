"""Copies between device and host, and what is counted. Both are one here: nothing is in flight."""

import torch

from meshfold.offload.host_link import HostLink


def test_copies_are_copies_and_are_counted() -> None:
    link = HostLink(torch.device("cpu"))
    source = torch.arange(4.0)
    arrived = link.on_host(source)
    source.zero_()
    link.add_on_host(arrived, torch.ones(4))
    copy = torch.empty(4, dtype=torch.bfloat16)
    link.to_device(copy, arrived)
    link.wait(link.arrival())
    link.settle()
    assert arrived.tolist() == copy.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert (link.num_bytes_to_host, link.num_bytes_to_device) == (2 * 16, 8)
