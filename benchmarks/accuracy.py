"""Predicted step times and memory against published training runs.

    python benchmarks/accuracy.py [RUNS] [--dataset NAME] [--sample N] [--save FILE] [--rows]
                                  [--bands FILE] [--folds]
    python benchmarks/accuracy.py --memory [--save FILE] [--rows]
    python benchmarks/accuracy.py --named

RUNS is a JSON file of runs (benchmarks/published/runs.py says which fields); without it the runs
that come with the project. Every run goes through the pipeline that users call, its degrees as
pins, and is captured once per shape. --save keeps predictions in a file and goes on where it
stopped; delete the file after a change of the cost model. --sample takes N runs of each dataset,
evenly. --bands writes the table of errors that plans print beside their step time
(cost_models/hardware/error_bands.json). --folds adds a five-fold split by dataset: errors of a
fifth under a factor per family of devices that is fitted to the other four. --named takes the runs
of benchmarks/published/named.json instead, and plans each once more without its pins: the published
plan in its framework and as an emitted program, beside the plan that the search chooses.
--memory takes the runs with a published peak (benchmarks/published/memory.json, and those of RUNS),
a row a source: what is allocated, predicted over published (benchmarks/published/memory.py).

A row a dataset: runs, mean absolute error, bias and worst error of the step time, the mean absolute
error of one constant efficiency per family of devices (the yardstick), runs that are said not to
fit, and the memory error; then regrets of the plan that is predicted fastest in groups of plans,
and what could not be expressed, by reason. The last line is the summary over dense runs of quality
A and B.
"""

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean

import click
from published.bands import bands_json
from published.folds import folds
from published.named import named_runs, named_table
from published.predict import Prediction, predicted
from published.runs import DEFAULT, WITH_MEMORY, Run, read_runs
from published.score import Scored, Summary, by_dataset, regrets, timed, yardstick


def predictions(runs: Sequence[Run], save: Path | None) -> list[Scored]:
    """The prediction of every run, those that are saved from their file."""
    known = json.loads(save.read_text("utf-8")) if save and save.exists() else {}
    out = []
    with click.progressbar(sorted(runs, key=shape_key), label="runs") as bar:
        for run in bar:
            if run.id not in known:
                known[run.id] = asdict(predicted(run))
                if save:
                    new = save.with_suffix(save.suffix + ".new")
                    new.write_text(json.dumps(known), "utf-8")
                    os.replace(new, save)
            out.append(Scored(run, Prediction(**known[run.id])))
    return out


def shape_key(run: Run) -> tuple[str | int, ...]:
    """Runs of one shape are next to each other: they are captured once."""
    return run.dataset, run.hidden_size, run.num_layers, run.seq_len, run.global_batch_size, run.id


def sampled(runs: Sequence[Run], count: int) -> list[Run]:
    """`count` runs of each dataset, evenly."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.dataset, []).append(run)
    out = []
    for group in groups.values():
        step = max(1.0, len(group) / count)
        out += [group[int(k * step)] for k in range(min(count, len(group)))]
    return out


def table(scored: Sequence[Scored]) -> None:
    """A row a dataset."""
    constants = yardstick(scored)
    click.echo(
        f"{'dataset':<24}{'runs':>5}{'mean':>8}{'bias':>8}{'worst':>8}{'yardstick':>11}"
        f"{'refused':>9}{'memory':>8}"
    )
    for dataset, group in by_dataset(timed(scored)).items():
        errors = Summary.of([s.error for s in group])
        memory = [abs(m) for s in group if (m := s.memory_error) is not None]
        constant = f"{constants[dataset]:.1%}" if dataset in constants else "-"
        refused = sum(s.prediction.fits is False for s in group)
        click.echo(
            f"{dataset:<24}{errors.num_runs:>5}{errors.mean_absolute:>8.1%}{errors.bias:>+8.1%}"
            f"{errors.worst:>+8.1%}{constant:>11}{refused:>9}"
            f"{f'{mean(memory):.1%}' if memory else '-':>8}"
        )


def memory_table(scored: Sequence[Scored], with_rows: bool) -> None:
    """A row a source, and one of all."""
    found = [(s, e) for s in scored if (e := s.memory_error) is not None]
    if with_rows:
        for s, error in found:
            click.echo(f"{s.run.id:<100}{s.run.peak_mem_gib:>9.3f}{error:>+8.1%}")
    click.echo(f"{'source':<24}{'runs':>5}{'mean':>8}{'bias':>8}{'worst':>8}")
    for name, group in (*by_dataset([s for s, _ in found]).items(), ("all", [s for s, _ in found])):
        errors = Summary.of([s.memory_error or 0.0 for s in group])
        click.echo(
            f"{name:<24}{errors.num_runs:>5}{errors.mean_absolute:>8.1%}{errors.bias:>+8.1%}"
            f"{errors.worst:>+8.1%}"
        )
    reasons = Counter(s.prediction.reason for s in scored if s.prediction.reason)
    for reason, count in reasons.most_common():
        click.echo(f"not predicted: {count:>4}  {reason}")


def rows(scored: Sequence[Scored]) -> None:
    """A row a run."""
    for s in scored:
        step_s = s.prediction.step_s
        if step_s is None or s.run.iter_time_s is None:
            click.echo(f"{s.run.id:<52} {s.prediction.reason}")
        else:
            click.echo(
                f"{s.run.id:<52}{s.run.iter_time_s:>10.3f}{step_s:>10.3f}{s.error:>+8.1%}"
                f"{'' if s.prediction.fits else '  does not fit'}"
            )


def fold_table(scored: Sequence[Scored]) -> None:
    """A row a fold; the last one is over all runs, held out each."""
    click.echo(f"\n{'held out':<62}{'runs':>5}{'fitted':>8}{'bias':>8}{'as it is':>10}{'bias':>8}")
    found = folds(scored)
    count = sum(f.as_it_is.num_runs for f in found)
    totals = [0.0] * 4
    for fold in found:
        figures = [fold.fitted.mean_absolute, fold.fitted.bias]
        figures += [fold.as_it_is.mean_absolute, fold.as_it_is.bias]
        share = fold.as_it_is.num_runs / count
        totals = [t + share * f for t, f in zip(totals, figures, strict=True)]
        _fold_row(", ".join(fold.datasets), fold.as_it_is.num_runs, figures)
    _fold_row("all", count, totals)


def _fold_row(name: str, count: int, figures: Sequence[float]) -> None:
    fitted, fitted_bias, as_it_is, bias = figures
    click.echo(
        f"{name:<62}{count:>5}{fitted:>8.1%}{fitted_bias:>+8.1%}{as_it_is:>10.1%}{bias:>+8.1%}"
    )


@click.command(help=__doc__)
@click.argument("runs", type=click.Path(path_type=Path, dir_okay=False), default=DEFAULT)
@click.option("--dataset", multiple=True, help="Of this dataset alone.")
@click.option("--sample", type=click.IntRange(1), help="Runs of each dataset.")
@click.option("--save", type=click.Path(path_type=Path, dir_okay=False), help="Keeps predictions.")
@click.option("--bands", type=click.Path(path_type=Path, dir_okay=False), help="Write the table.")
@click.option("--folds", "with_folds", is_flag=True, help="Also a five-fold split by dataset.")
@click.option("--named", is_flag=True, help="Large runs by name, beside the plan that we choose.")
@click.option("--memory", is_flag=True, help="Peak memory alone, of all runs that say it.")
@click.option("--rows", "with_rows", is_flag=True, help="Also a row a run.")
def main(
    runs: Path,
    dataset: tuple[str, ...],
    sample: int | None,
    save: Path | None,
    bands: Path | None,
    with_folds: bool,
    named: bool,
    memory: bool,
    with_rows: bool,
) -> None:
    if named:
        named_table(named_runs())
        return
    found = read_runs(runs)
    if memory:
        every = (*read_runs(WITH_MEMORY).runs, *found.runs)
        peaks = [r for r in every if r.peak_mem_gib and (not dataset or r.dataset in dataset)]
        memory_table(predictions(peaks, save), with_rows)
        return
    chosen = [r for r in found.runs if r.is_dense_step and (not dataset or r.dataset in dataset)]
    if not chosen:
        raise click.ClickException(f"{runs}: no dense runs of quality A or B with a step time")
    scored = predictions(chosen if sample is None else sampled(chosen, sample), save)
    if bands:
        asked = [f"--dataset {name}" for name in dataset]
        asked += [f"--sample {sample}"] if sample is not None else []
        command = " ".join(("python benchmarks/accuracy.py", *asked, "--bands"))
        bands.write_text(bands_json(scored, command), "utf-8")
    if with_rows:
        rows(scored)
    table(scored)
    if losses := regrets(scored):
        click.echo(
            f"\nregret of the plan predicted fastest, {len(losses)} groups: mean "
            f"{mean(losses):.1%}, worst {max(losses):.1%}, {sum(loss > 0.3 for loss in losses)} "
            f"over 30 %"
        )
    if with_folds and timed(scored):
        fold_table(scored)
    reasons = Counter(s.prediction.reason for s in scored if s.prediction.reason)
    for reason, count in (*reasons.most_common(), *found.incomplete.items()):
        click.echo(f"not predicted: {count:>4}  {reason}")
    if both := timed(scored):
        total = Summary.of([s.error for s in both])
        refused = sum(s.prediction.fits is False for s in both)
        click.echo(
            f"\nsummary: {total.num_runs} runs, mean absolute error {total.mean_absolute:.1%}, "
            f"bias {total.bias:+.1%}, worst {total.worst:+.1%}, {refused} refused for memory"
        )


if __name__ == "__main__":
    main()
