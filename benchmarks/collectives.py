"""The cost model's collectives against measured ones.

    python benchmarks/collectives.py [CURVES] [--points]

CURVES is a JSON file of measurements (benchmarks/published/measured_collectives.py says which
fields); without it the public ones that come with the project. A row a curve: mean and worst
relative error of the predicted time over its sizes, with "-" for those that do not count in the
summary and why. --points adds a row a size.
"""

from pathlib import Path

import click
from published.measured_collectives import DEFAULT, CurveErrors, errors_of, read_curves, summary_of


def row(found: CurveErrors, with_points: bool) -> None:
    """One curve."""
    curve = found.curve
    sizes = [num_bytes for num_bytes, _ in curve.points]
    span = f"{_size(sizes[0])}" + (f"-{_size(sizes[-1])}" if len(sizes) > 1 else "")
    line = f"{curve.kind:<15}{curve.label:<28}{curve.nodes:>3} x {curve.per_node:<3}{span:>14}"
    if not found.errors:
        click.echo(f"{line}{'-':>8}{'-':>8}  no preset {curve.cluster}")
        return
    note = curve.left_out or curve.unsure or ""
    mark = "- " if curve.left_out else ""
    line += f"{found.mean_absolute:>8.1%}{found.worst:>+8.1%}  {mark}{note}"
    click.echo(line.rstrip())
    if with_points:
        for (num_bytes, seconds), error in zip(curve.points, found.errors, strict=True):
            click.echo(f"{_size(num_bytes):>63}{seconds * 1e6:>12.1f} us{error:>+8.1%}")


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.0f} GiB"


@click.command(help=__doc__)
@click.argument("curves", type=click.Path(path_type=Path, dir_okay=False), default=DEFAULT)
@click.option("--points", is_flag=True, help="Also a row a size.")
def main(curves: Path, points: bool) -> None:
    found = [errors_of(curve) for curve in read_curves(curves)]
    click.echo(f"{'collective':<15}{'machine':<28}{'ranks':<9}{'sizes':>14}{'mean':>8}{'worst':>8}")
    for one in found:
        row(one, points)
    count, error, worst = summary_of(found)
    click.echo(
        f"\nsummary: {count} of {len(found)} curves, mean error {error:.1%}, worst {worst:+.1%}"
    )


if __name__ == "__main__":
    main()
