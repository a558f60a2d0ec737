"""What a device has on its host, added up."""

from meshfold.passes.memory.host_use import HostUse


def test_uses_add_up() -> None:
    assert HostUse(1, 2) + HostUse(10) == HostUse(11, 2) and HostUse() == HostUse(0, 0)
