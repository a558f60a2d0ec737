"""Parameters on the host: copies with every forward, gradients that leave, steps that fail."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from meshfold.offload.copies import DeviceCopy
from meshfold.offload.host_parameters import HostParameters
from meshfold.torch_compat.tensor_subclasses import plain_tensor
from meshfold.training.shards.local_shard import local_parameter, local_tensor


def stored(*names: str) -> dict[str, Tensor]:
    return {name: nn.Parameter(torch.arange(3.0)) for name in names}


def on_host(parameters: Mapping[str, Tensor], *copies: DeviceCopy) -> tuple[HostParameters, list]:
    told: list[str] = []
    cpu = torch.device("cpu")
    return HostParameters(copies, parameters, cpu, lambda name, _: told.append(name)), told


def test_gradients_leave_and_whoever_changed_parameters_copies_follow() -> None:
    parameters = stored("w", "other")
    host, told = on_host(parameters, DeviceCopy("w", torch.float32))
    for k in range(1, 3):
        device = host.on_device(parameters)
        assert device["other"] is parameters["other"] and device["w"] is not parameters["w"]
        (device["w"] ** 2).sum().backward()
        assert device["w"].grad is None
        assert parameters["w"].grad.tolist() == [0.0, 2.0 * k, 4.0 * k]
    assert told == ["w"] and host.num_device_bytes == 12
    parameters["w"].data.copy_(torch.ones(3))  # as an optimizer that autograd does not see
    assert host.on_device(parameters)["w"].tolist() == [1.0] * 3


@pytest.mark.parametrize("is_shared", [False, True])
def test_what_is_frozen_later_gets_no_gradient(is_shared: bool) -> None:
    parameters = stored("w")
    host, told = on_host(parameters, DeviceCopy("w", torch.float32, not is_shared, is_shared))
    parameters["w"].requires_grad_(False)
    with host.whole_step():
        (host.on_device(parameters)["w"] ** 2).sum().backward()
    assert parameters["w"].grad is None and not told
    parameters["w"].requires_grad_(True)
    with host.whole_step():
        (host.on_device(parameters)["w"] ** 2).sum().backward()
    assert parameters["w"].grad.tolist() == [0.0, 2.0, 4.0] and told == ["w"]


def test_a_graph_goes_on_after_another_forward_but_not_after_a_change() -> None:
    parameters = stored("w")
    host, _ = on_host(parameters, DeviceCopy("w", torch.float32))
    first = (host.on_device(parameters)["w"] ** 2).sum()
    second = (host.on_device(parameters)["w"] ** 2).sum()
    (first + second).backward()
    assert parameters["w"].grad.tolist() == [0.0, 4.0, 8.0]
    late = (host.on_device(parameters)["w"] ** 2).sum()
    with torch.no_grad():
        parameters["w"].add_(1.0)
    host.on_device(parameters)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.backward()


def test_masters_are_wider_than_what_the_device_has() -> None:
    parameters = stored("w")
    host, _ = on_host(parameters, DeviceCopy("w", torch.bfloat16))
    copy = host.on_device(parameters)["w"]
    assert copy.dtype == torch.bfloat16 and host.num_device_bytes == 6
    assert host.takes(copy) and not host.takes(parameters["w"])
    host.take(copy, torch.full((3,), 1e-9))
    assert parameters["w"].grad.dtype == torch.float32


def test_a_whole_step_that_fails_leaves_gradients_as_they_were() -> None:
    parameters = stored("w", "tied")
    shared = DeviceCopy("tied", torch.float32, has_one_use=False, is_shared=True)
    host, _ = on_host(parameters, DeviceCopy("w", torch.float32), shared)

    def step(fails: bool) -> None:
        device = host.on_device(parameters)
        with host.whole_step():
            for _ in range(2):
                (device["w"] * device["tied"]).sum().backward()
            assert parameters["tied"].grad is None, "other stages add to it first"
            if fails:
                raise TimeoutError

    step(False)
    before = [p.grad.tolist() for p in parameters.values()]
    assert before == [[0.0, 2.0, 4.0]] * 2
    with pytest.raises(TimeoutError):
        step(True)
    assert [p.grad.tolist() for p in parameters.values()] == before
    step(False)
    assert [p.grad.tolist() for p in parameters.values()] == [[0.0, 4.0, 8.0]] * 2


@pytest.mark.parametrize("by_layer", [False, True])
def test_copies_of_shards_are_plain_so_that_a_step_knows_them_again(by_layer: bool) -> None:
    """A program takes a shard as a plain tensor, which is the copy itself."""
    parameters = {"w": local_parameter(torch.arange(3.0), requires_grad=True)}
    host, told = on_host(parameters, DeviceCopy("w", torch.float32, comes_by_layer=by_layer))
    copy = host.on_device(parameters)["w"]
    assert plain_tensor(copy) is copy and host.takes(plain_tensor(copy))
    assert host.comes_by_layer is by_layer
    host.take(copy, torch.ones(3))
    assert local_tensor(parameters["w"].grad).tolist() == [1.0] * 3 and told == ["w"]
