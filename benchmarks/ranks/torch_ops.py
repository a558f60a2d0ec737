"""The rule table against the samples by which torch tests its own ops.

    python benchmarks/ranks/torch_ops.py [NAME ...] [--part 1/1]

Needs expecttest (pip install expecttest), which torch's samples import. Of every op of torch
(default: all, some 20 minutes), in float64:

  - a model that calls it is captured: which of its ops have no rule, and run whole on every rank?
  - every rule of every kernel that it runs is held against simulated ranks, axes of 2 and 5:
    results and gradients.

Prints a line for an op that has no rule or is not captured, and for a rule that is wrong; exits 1
if one is. --part I/N takes each Nth op, from the Ith on.
"""

import itertools
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import click
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))  # support/

from support.graphs.ops import SingleOp, check_typings, mesh_of

from meshfold.capture.pipeline import capture
from meshfold.errors import MeshfoldError
from meshfold.passes.rules.table import op_labels

SAMPLES_PER_OP, CALLS_PER_KERNEL = 12, 8
LARGEST = 20_000
"""Numbers in an operand."""

MOST_TYPINGS = 60
SIZES = (2, 5)
"""Of axes; most dims of torch's samples are 5 or 10."""

LIMIT_S = 60
OTHERWISE = ("_to_copy", "floor_divide", "heaviside", "special_zeta")
"""Kernels whose gradients are rounded, or have no formula."""

TENSOR = Tensor
"""The class, which a copy of a model keeps as it is."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class TooLongError(Exception):
    """One op took LIMIT_S."""


@contextmanager
def limited() -> Iterator[None]:
    """Raises TooLongError inside after LIMIT_S."""

    def stop(_: int, __: FrameType | None) -> None:
        raise TooLongError(f"takes longer than {LIMIT_S} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)


class Calls(TorchDispatchMode):
    """Keeps the kernels that run inside, with copies of their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, Arguments]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "aten" and not func._schema.is_mutable:
            self.found.append((str(func), tree_map(_copied, (args, kwargs))))
        return func(*args, **kwargs)


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


class CallsOp(nn.Module):
    """The mean of what an op gives, its first operand times a parameter. leaves: its arguments,
    TENSOR in place of tensors."""

    def __init__(self, op: Any, leaves: Sequence[Any], spec: Any) -> None:
        super().__init__()
        self.op, self.leaves, self.spec = op, leaves, spec
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, *tensors: Tensor) -> Tensor:
        """tensors: of any shapes, those among the arguments."""
        first, *others = tensors
        given = iter((first * self.scale if first.is_floating_point() else first, *others))
        leaves = [next(given) if leaf is TENSOR else leaf for leaf in self.leaves]
        x, args, kwargs = tree_unflatten(leaves, self.spec)
        found = [y for y in tree_leaves(self.op(x, *args, **kwargs)) if isinstance(y, Tensor)]
        parts = [torch.view_as_real(y) if y.is_complex() else y.double() for y in found]
        return torch.stack([part.sin().mean() for part in parts]).sum() * self.scale


def samples_of(info: Any) -> list[Any]:
    """Arguments of an op, as torch tests it; none where it has none in float64."""
    if torch.float64 not in info.dtypes:
        return []
    drawn = info.sample_inputs("cpu", torch.float64, requires_grad=False)
    try:
        return list(itertools.islice(drawn, SAMPLES_PER_OP))
    except Exception:  # of other devices, or other packages
        return []


def gaps(info: Any, samples: Sequence[Any]) -> str:
    """Ops without a rule in a graph of the largest sample, or why it has no graph."""
    tensors = [s for s in samples if isinstance(s.input, Tensor) and s.input.dim()]
    for sample in sorted(tensors, key=lambda s: -s.input.numel())[:1]:
        leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
        kept = [TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        batch = {f"tensors_{k}": x for k, x in enumerate(y for y in leaves if torch.is_tensor(y))}
        try:
            regions = capture(CallsOp(info.op, kept, spec), batch).graph.regions
        except MeshfoldError as error:
            return f"refused: {error}"
        ops = [(region.graph, op) for region in regions for op in region.graph.ops]
        found = sorted({op.target for graph, op in ops if op_labels(graph, op) is None})
        return f"whole: {', '.join(found)}" if found else ""
    return ""


def kernels(info: Any, samples: Sequence[Any]) -> list[tuple[str, Arguments]]:
    """Kernels that the samples run, of each a few calls of moderate size."""
    found: list[tuple[str, Arguments]] = []
    for sample in samples:
        with Calls() as calls, torch.no_grad():
            try:
                info.op(sample.input, *sample.args, **sample.kwargs)
            except Exception:  # of other devices, or other packages
                continue
        found += calls.found
    counts: dict[str, int] = {}
    kept = []
    for target, arguments in found:
        tensors = [x for x in tree_leaves(arguments) if isinstance(x, Tensor)]
        counts[target] = counts.get(target, 0) + 1
        if counts[target] <= CALLS_PER_KERNEL and 0 < len(tensors) and _is_fit(target, tensors):
            kept.append((target, arguments))
    return kept


def _is_fit(target: str, tensors: Sequence[Tensor]) -> bool:
    is_wide = all(x.dtype not in (torch.float32, torch.bfloat16, torch.complex32) for x in tensors)
    is_dense = all(x.layout is torch.strided and x.numel() <= LARGEST for x in tensors)
    return is_wide and is_dense and not any(name in target for name in OTHERWISE)


def wrong_rule(target: str, arguments: Arguments) -> tuple[int, str]:
    """How many rules of a call were held against simulated ranks, and the one that is wrong."""
    try:
        args, kwargs = tree_map(_trained, arguments)
        op = SingleOp(target, *args, **kwargs)
        if op_labels(op.graph, op.graph.ops[0]) is None:
            return 0, ""
        _, outputs, gradients = op.on_one_rank
        if not all(torch.isfinite(x).all() for x in (*op.tensors, *outputs, *gradients)):
            return 0, ""
    except TooLongError:
        raise
    except Exception:  # results that are no tensors, operands that take no gradient
        return 0, ""
    count = 0
    for size in SIZES:
        typings = op.typings(size)
        typings = typings[:: len(typings) // MOST_TYPINGS + 1]
        try:
            check_typings(op, mesh_of(size), typings)
        except (AssertionError, RuntimeError) as error:
            shapes = [list(x.shape) for x in op.tensors]
            return count, f"{target} of {shapes} on {size} ranks: {' '.join(str(error).split())}"
        count += len(typings)
    return count, ""


def _trained(leaf: Any) -> Any:
    return leaf.requires_grad_() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def checked(info: Any) -> tuple[int, list[str]]:
    """How many rules were checked, and a line for everything that is to be said of an op."""
    name = f"{info.name} {info.variant_test_name}".strip()
    count, lines = 0, []
    try:
        with limited():
            samples = samples_of(info)
            if found := gaps(info, samples):
                lines.append(f"{name}: {found[:300]}")
        for target, arguments in kernels(info, samples):
            with limited():
                more, wrong = wrong_rule(target, arguments)
            count += more
            if wrong:
                lines.append(f"{name}: WRONG {wrong[:500]}")
    except TooLongError as error:
        lines.append(f"{name}: {error}")
    return count, lines


def database() -> Sequence[Any]:
    """torch's own, which is private. UsageError where what it needs is not there."""
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    except ImportError as error:
        raise click.UsageError(f"torch's samples need a package: {error}; install it") from error
    found: Sequence[Any] = op_db
    return found


@click.command()
@click.argument("names", nargs=-1)
@click.option("--part", default="1/1", show_default=True, help="I/N: each Nth op from the Ith on.")
def main(names: tuple[str, ...], part: str) -> None:
    """Hold the rule table against ops of torch (default: all)."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    infos = database()
    for name in names:
        if name not in {info.name for info in infos}:
            raise click.UsageError(f"no op {name!r} in torch's samples")
    first, every = map(int, part.split("/"))
    num_rules, num_gaps, num_wrong = 0, 0, 0
    for info in [x for x in infos if not names or x.name in names][first - 1 :: every]:
        count, lines = checked(info)
        num_rules += count
        num_wrong += sum("WRONG" in line for line in lines)
        num_gaps += sum("WRONG" not in line for line in lines)
        for line in lines:
            click.echo(line)
    click.echo(f"{num_rules:,} rules checked, {num_wrong} wrong; {num_gaps} ops with gaps")
    sys.exit(1 if num_wrong else 0)


if __name__ == "__main__":
    main()
