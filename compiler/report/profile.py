"""What a profile found, as text for people: figures of the cluster, and how far they are off."""

from collections.abc import Iterator

from rich.console import Group, RenderableType

from meshfold.cost_models.calibration.fitted_cluster import Fitted
from meshfold.cost_models.calibration.points import Profile
from meshfold.ir.cluster import LinkSpec
from meshfold.report.tables import indented, section, table_of
from meshfold.units import bytes_text, seconds_text, three_digits


def profile_view(profile: Profile, found: Fitted) -> RenderableType:
    """The page that `meshfold profile` prints."""
    table = table_of("what", "value", "about")
    for row in _figures(profile, found):
        table.add_row(*row)
    errors = table_of(
        "points", "number", "rms error", "median", "worst", right=_RIGHT, fold=("worst",)
    )
    for kind, of in found.residuals.items():
        errors.add_row(
            kind,
            str(of.num_points),
            f"{of.rms:.0%}",
            f"{of.median:.0%}",
            f"{of.worst:+.0%} {of.worst_name}",
        )
    return Group(
        section("measured", indented(table)), section("fitted against measured", indented(errors))
    )


_RIGHT = ("number", "rms error", "median")


def _figures(profile: Profile, found: Fitted) -> Iterator[tuple[str, str, str]]:
    machine, cluster = profile.machine, found.cluster
    (group,) = cluster.groups
    device = group.device
    nodes = f"{group.num_nodes} x {group.devices_per_node} {device.name}"
    yield "processes", nodes, f"{machine.cores} cores, {machine.backend}, torch {machine.torch}"
    yield "memory", bytes_text(device.memory_bytes), f"{bytes_text(device.reserve_bytes)} reserved"
    for dtype, rate in found.rates.flops_per_s.items():
        yield dtype, _rate(rate, "flop/s"), "products"
    for dtype, rate in found.rates.attention_flops_per_s.items():
        yield dtype, _rate(rate, "flop/s"), "attention"
    yield (
        "memory bandwidth",
        _rate(found.rates.memory_bytes_per_s, "B/s"),
        f"{device.memory_efficiency:.0%} of the fastest kernel",
    )
    alone = seconds_text(found.alone.launch_s)
    yield "launch", seconds_text(device.launch_s), f"per kernel in a model; by itself {alone}"
    slower = found.alone.memory_bytes_per_s / found.rates.memory_bytes_per_s
    yield "in a model", f"{slower:.2f}", "times slower than kernels by themselves"
    if profile.host_bytes_per_s:
        yield "to the host", _rate(profile.host_bytes_per_s, "B/s"), "each direction"
    if profile.contention:
        yield "overlap", f"{device.overlap_slowdown:.2f}", "times slower while both run"
    if any(p.num_nodes == 1 for p in profile.collectives.values()):
        yield "link", *_link(group.link)
    if any(p.num_nodes > 1 for p in profile.collectives.values()):
        yield "network", *_link(cluster.network)


def _link(link: LinkSpec) -> tuple[str, str]:
    start, latency = seconds_text(link.start_s), seconds_text(link.latency_s)
    return _rate(link.bytes_per_s, "B/s"), f"start {start}, {latency} per message"


def _rate(per_s: float, unit: str) -> str:
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if per_s >= scale:
            return f"{three_digits(per_s / scale)} {prefix}{unit}"
    return f"{per_s:.0f} {unit}"
