"""The cluster of a profile, and how well it says what was measured."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from meshfold.cost_models.calibration.kernel_rates import (
    Rates,
    best_rate,
    kernel_rates,
    model_rates,
)
from meshfold.cost_models.calibration.link_rates import fitted_link, fitted_network, link_errors
from meshfold.cost_models.calibration.points import CollectivePoint, KernelPoint, Profile
from meshfold.cost_models.calibration.residuals import Residual, residual
from meshfold.ir.cluster import ClusterSpec, DeviceSpec, LinkSpec, NodeGroup

LINK, NETWORK = "measured-link", "measured-network"
_UNKNOWN = LinkSpec(LINK, 4e8, 1e-5, "not measured: no two processes of the profile were joined so")


@dataclass(frozen=True)
class Fitted:
    """The cluster of a profile. residuals: by kind of kernel, and by collective; of kernels by
    themselves from their own rates."""

    cluster: ClusterSpec
    alone: Rates
    """Of kernels by themselves."""
    rates: Rates
    """Of kernels in a model: those of the cluster."""
    residuals: Mapping[str, Residual]


def fitted(profile: Profile, name: str, source: str) -> Fitted:
    """The cluster `name` of a profile. source: who measured, when.

    Raises ClusterSpecError where too little was measured.
    """
    machine = profile.machine
    alone = kernel_rates(profile.kernels)
    rates = model_rates(profile.kernels, alone)
    kernel_errors = {
        name: (rates if p.kind == "block" else alone).seconds(p) / p.seconds - 1
        for name, p in profile.kernels.items()
        if rates.knows(p)
    }
    known = {name: profile.kernels[name] for name in kernel_errors}
    residuals = _grouped(known, kernel_errors, lambda p: p.kind)
    link, network = _UNKNOWN, replace(_UNKNOWN, name=NETWORK)
    in_node = {n: p for n, p in profile.collectives.items() if p.num_nodes == 1}
    between = {n: p for n, p in profile.collectives.items() if p.num_nodes > 1}
    if in_node:
        link = fitted_link(in_node, link)
        link = replace(link, source=_source(source, link_errors(in_node, link, network)))
    if between:
        network = fitted_network(between, link, network)
        network = replace(network, source=_source(source, link_errors(between, link, network)))
    errors = link_errors(profile.collectives, link, network)
    residuals |= _grouped(profile.collectives, errors, lambda p: p.kind)
    device = _device(profile, rates, _source(source, kernel_errors))
    nodes = NodeGroup(device, machine.processes // machine.per_node, machine.per_node, link)
    return Fitted(ClusterSpec(name, (nodes,), network), alone, rates, residuals)


def _source(source: str, errors: Mapping[str, float]) -> str:
    found = residual(errors)
    return f"{source}; fitted to {found.num_points} points, rms error {found.rms:.0%}"


P = TypeVar("P", KernelPoint, CollectivePoint)


def _grouped(
    points: Mapping[str, P], errors: Mapping[str, float], kind_of: Callable[[P], str]
) -> dict[str, Residual]:
    kinds = dict.fromkeys(kind_of(p) for p in points.values())
    return {
        kind: residual({n: errors[n] for n, p in points.items() if kind_of(p) == kind})
        for kind in kinds
    }


def _device(profile: Profile, rates: Rates, source: str) -> DeviceSpec:
    """The peak that is written is the best rate that was measured, the efficiency what the fit has
    of it: plans are priced with their product."""
    points = profile.kernels.values()
    flops_per_s, bytes_per_s = rates.flops_per_s["float32"], rates.memory_bytes_per_s
    efficiency = flops_per_s / max(best_rate(points, "gemm", "float32"), flops_per_s)
    bandwidth = max(best_rate(points, "memory"), bytes_per_s)
    peaks = {d: rate / efficiency for d, rate in rates.flops_per_s.items()}
    attention = _attention_efficiency(rates, peaks)
    device = DeviceSpec(
        name=profile.machine.device,
        memory_bytes=profile.memory.total_bytes,
        memory_bytes_per_s=bandwidth,
        peak_flops_per_s=peaks,
        matmul_efficiency=efficiency,
        memory_efficiency=bytes_per_s / bandwidth,
        launch_s=rates.launch_s,
        reserve_bytes=profile.memory.reserve_bytes,
        source=source,
        host_bytes_per_s=profile.host_bytes_per_s or 0.0,
        attention_efficiency=attention,
        attention_backward_efficiency=attention,
        host_op_s=_host_op_s(profile),
    )
    if profile.contention is None:
        return device
    return replace(device, overlap_slowdown=profile.contention.slowdown)


def _attention_efficiency(rates: Rates, peaks: Mapping[str, float]) -> float:
    """Of attention forward and backward together, which are measured so; 0 where none was."""
    for dtype in ("bfloat16", "float32"):
        if dtype in rates.attention_flops_per_s and dtype in peaks:
            return min(1.0, rates.attention_flops_per_s[dtype] / peaks[dtype])
    return 0.0


def _host_op_s(profile: Profile) -> float:
    """What the host needs for one op of a chain of tiny ones, where it issues them to a device."""
    chain = profile.kernels.get("starts/backward")
    if profile.machine.backend != "nccl" or chain is None:
        return 0.0
    return chain.seconds / chain.kernels
