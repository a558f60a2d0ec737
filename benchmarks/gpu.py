"""What one device says about the predictions: any CUDA device, or the CPU with a tiny model.

    python benchmarks/gpu.py -o gpu.json [--minutes 30] [--device cuda]

In turns, until the minutes are over:

    profile       kernels of this device, as `meshfold profile` measures them (5 minutes at most)
    alone         the program of one rank against the model itself: loss and gradients in float32
                  and bfloat16, seconds and peak memory of forward and backward
    ranks         rank 0 of programs for 1 to 64 ranks: its real compute and memory, with
                  collectives that are faked (a copy each), against the prediction: with the preset
                  of the device, and with its profile

FILE is written after every item, so that an interrupted run keeps what it has, and the same command
goes on; items that failed run again. Needs no other process and no network.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))  # support/

from measuring.cases import DTYPES, PLANS, SIZES, Item, alone_item, rank_item

from meshfold._version import __version__
from meshfold.cli.profile_command import cluster_of
from meshfold.cost_models.calibration.points_file import profile_from_json, profile_to_json
from meshfold.ir.cluster import DeviceSpec
from meshfold.plan_file.output_file import output_target, write_whole
from meshfold.profiling.session import profile
from meshfold.profiling.timing import Timer

PROFILE = "profile"
SAMPLE_S = {"cpu": 0.01, "cuda": 0.2}
FORMAT = 1


class Record:
    """The file: what was measured, by name."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self.path = output_target(path)
        is_cuda = device.type == "cuda"
        self.head: Item = {
            "format": FORMAT,
            "device": torch.cuda.get_device_name(device) if is_cuda else "cpu",
            "torch": torch.__version__,
            "meshfold": __version__,
        }
        self.items: dict[str, Item] = {}
        if self.path.exists():
            self._read()

    def _read(self) -> None:
        try:
            found = json.loads(self.path.read_text("utf-8"))
            is_ours = all(found.get(key) == value for key, value in self.head.items())
        except (ValueError, AttributeError):
            is_ours = False
        if not is_ours:
            raise click.ClickException(
                f"{self.path}: is no file of this benchmark, device and torch; name another one"
            )
        self.items = {n: item for n, item in found["items"].items() if "error" not in item}

    def add(self, name: str, item: Item) -> None:
        """Keep an item."""
        self.items[name] = item
        write_whole(self.path, json.dumps({**self.head, "items": self.items}, indent=1) + "\n")


def profile_item(device: torch.device, minutes: float) -> Item:
    """Kernels of this one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = profile(device, 1, minutes, None, lambda *_: None)
    finally:
        dist.destroy_process_group()
    fitted = cluster_of(found, PROFILE)
    errors = {kind: vars(of) for kind, of in fitted.residuals.items()}
    return {"points": json.loads(profile_to_json(found)), "residuals": errors}


def profiled_device(item: Item | None) -> DeviceSpec | None:
    """The device that a profile item is of."""
    if item is None or "error" in item:
        return None
    found = cluster_of(profile_from_json(json.dumps(item["points"])), PROFILE)
    device: DeviceSpec = found.cluster.groups[0].device
    return device


def items(record: Record, device: torch.device, minutes: float) -> Iterator[tuple[str, Any]]:
    """(name, what measures it), the most telling first."""
    size, timer = SIZES[device.type], Timer(device, SAMPLE_S[device.type])
    yield PROFILE, partial(profile_item, device, min(minutes / 4, 5.0))
    for dtype in ("float32", "bfloat16"):
        yield f"alone/{dtype}", partial(alone_item, size, dtype, timer)
    for dtype in DTYPES[device.type]:
        for num_ranks, pins in PLANS:
            pinned = ",".join(f"{key}={value}" for key, value in pins.items())
            measured = profiled_device(record.items.get(PROFILE))
            run = partial(rank_item, size, dtype, num_ranks, pins, timer, measured)
            yield f"ranks/{dtype}/{num_ranks}/{pinned}", run


def measured(run: Callable[[], Item]) -> Item:
    """An item, or why there is none."""
    try:
        return run()
    except Exception as error:  # the other items are worth having
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def summary(record: Record) -> Iterator[str]:
    """A line per item, and median errors."""
    errors: dict[str, list[float]] = {}
    for name, item in record.items.items():
        if "error" in item:
            yield f"{name:<52} {item['error']}"
        elif name.startswith("ranks/"):
            seconds, peak = item["measured_compute_s"], item["measured_peak_bytes"]
            off = {
                "compute": item["predicted_compute_s"] / seconds - 1,
                "memory": item["predicted_peak_bytes"] / peak - 1,
            }
            if "predicted_with_profile_s" in item:
                off["with profile"] = item["predicted_with_profile_s"] / seconds - 1
            for key, value in off.items():
                errors.setdefault(key, []).append(abs(value))
            text = ", ".join(f"{key} {value:+.1%}" for key, value in off.items())
            yield f"{name:<52} {1e3 * seconds:8.2f} ms, {peak / 1e6:8.1f} MB; {text}"
        elif name.startswith("alone/"):
            faster = item["program_step_s"] / item["model_step_s"]
            yield (
                f"{name:<52} loss off by {item['loss_error']:.1e}, gradients by "
                f"{item['worst_gradient_error']:.1e}; step {faster:.2f} of the model's"
            )
    for key, values in errors.items():
        yield f"median error, {key}: {median(values):.1%} of {len(values)}"


@click.command(help=__doc__)
@click.option("--output", "-o", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--minutes", type=click.FloatRange(0, 600, min_open=True), default=30.0)
@click.option("--device", help="cpu, cuda, cuda:1. [default: the first GPU, else the CPU]")
def main(output: Path, minutes: float, device: str | None) -> None:
    end_s = time.monotonic() + 60 * minutes
    on = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if on.type == "cuda":
        torch.cuda.set_device(on)
    else:
        torch.set_num_threads(1)
    record = Record(output, on)
    try:
        for name, run in items(record, on, minutes):
            if time.monotonic() > end_s:
                click.echo("time is over; the same command goes on", err=True)
                break
            if name not in record.items:
                click.echo(name, err=True)
                record.add(name, measured(run))
    except KeyboardInterrupt:
        raise click.ClickException(
            f"interrupted; {len(record.items)} items are in {output}, and the same command goes on"
        ) from None
    for line in summary(record):
        click.echo(line)


if __name__ == "__main__":
    main()
