"""What ranks do that differ in one thing, on gloo processes."""

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import meshfold
from meshfold.api import bind
from meshfold.capture.pipeline import Captured
from meshfold.distributed.agreement import extremes
from meshfold.errors import MeshfoldError
from meshfold.plan_file.io import plan_from_json
from support.models.hugging_face import VOCABULARY, tiny_model
from support.programs.type_changes import Mlp

CLUSTER = "local-cpux4"
PINS = {"dp": 2, "tp": 2}
ODD = 3
"""The rank that differs."""


def model(seed: int = 0, width: int = 32) -> nn.Module:
    torch.manual_seed(seed)
    made = Mlp()
    if width != 32:
        made.up, made.down = nn.Linear(8, width), nn.Linear(width, 8, bias=False)
    return made


def batch(rows: int = 8, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    x, target = torch.randn((2, rows, 8), generator=generator)
    return {"x": x, "target": target}


def compiled(made: nn.Module | None = None, **arguments: Any) -> meshfold.CompiledModel:
    options = arguments.pop("options", meshfold.CompileOptions(pins=PINS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return meshfold.compile(made or model(), CLUSTER, batch(), options=options, **arguments)


def error_of(call: Callable[[], object]) -> str:
    """The line that a call ends with; empty for none."""
    try:
        call()
    except MeshfoldError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _seeds(odd: bool) -> None:
    compiled(model(seed=int(odd)), sync_module_states=False)


def _model(odd: bool) -> None:
    compiled(model(width=64 if odd else 32))


def _options(odd: bool) -> None:
    compiled(options=meshfold.CompileOptions(pins={**PINS, "zero": 3 if odd else 0}))


def _planning(odd: bool) -> None:
    compiled(options=meshfold.CompileOptions(pins={**PINS, "dp": 8} if odd else PINS))


def _user_error(odd: bool) -> None:
    class Broken(Mlp):
        def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            if odd:
                raise KeyError("weights.bin")
            return super().forward(x, target)

    compiled(Broken())


def _dtype(odd: bool) -> None:
    compiled().train_step({k: x.double() if odd else x for k, x in batch().items()})


def _shape(odd: bool) -> None:
    compiled().train_step(batch(rows=4 if odd else 8))


def _slice(odd: bool) -> None:
    made = compiled()
    own = {k: x[4 * made.data_rank : 4 * made.data_rank + 4] for k, x in batch().items()}
    made.train_step(batch() if odd else own)


def _rows(odd: bool) -> None:
    """A sampler that knows of the world alone."""
    made = compiled()
    own = dist.get_rank()
    made.train_step({k: x[2 * own : 2 * own + 4] for k, x in batch(16).items()})


def _contents(odd: bool) -> None:
    compiled().train_step(batch(seed=int(odd)))


def _contents_later(odd: bool) -> None:
    made = compiled(num_compared_batches=None)
    for _ in range(12):
        made.train_step(batch())
    made.train_step(batch(seed=int(odd)))


def _mode(odd: bool) -> None:
    made = compiled().train(not odd)
    made(**batch())


def _call(odd: bool) -> None:
    made = compiled()
    if odd:
        made(**batch())
    else:
        made.train_step(batch())


def _rates(odd: bool) -> None:
    made = compiled()
    optimizer = torch.optim.SGD(made.parameters(), lr=1.0 if odd else 0.1)
    for _ in range(2):  # compared before the second and the third step
        made.train_step(batch())
        optimizer.step()
    made.train_step(batch())


def _left_out(odd: bool) -> None:
    made = compiled()
    optimizer = torch.optim.SGD(made.parameters(), lr=1.0)
    for step in range(9):
        made.train_step(batch())
        if not (odd and step == 5):  # compared before the ninth step
            optimizer.step()
        optimizer.zero_grad()


def _initialised(odd: bool) -> None:
    made = compiled()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(float(odd))
    made.train_step(batch())


CASES: dict[str, Callable[[bool], None]] = {
    "seeds": _seeds,
    "model": _model,
    "options": _options,
    "planning": _planning,
    "user error": _user_error,
    "dtype": _dtype,
    "shape": _shape,
    "slice": _slice,
    "rows": _rows,
    "contents": _contents,
    "contents later": _contents_later,
    "mode": _mode,
    "call": _call,
    "rates": _rates,
    "left out": _left_out,
    "initialised": _initialised,
}


def extremes_of(rows: list[list[int]]) -> list[list[int]]:
    """The extremes of numbers of which every rank has a row."""
    group = dist.group.WORLD
    assert group is not None
    least, most = extremes(torch.tensor(rows[dist.get_rank()]), group, 60.0)
    return [least.tolist(), most.tolist()]


def without_one(timeout_s: float) -> tuple[float, str]:
    """Seconds until ranks notice that ODD is not there, and what torch says."""
    group = dist.new_group()
    assert group is not None
    told, begin_s = "", time.monotonic()
    if dist.get_rank() != ODD:
        try:
            extremes(torch.zeros(1, dtype=torch.int64), group, timeout_s)
        except RuntimeError as error:
            told = str(error)
    took_s = time.monotonic() - begin_s
    dist.barrier()  # ODD is there, and silent, until all others have noticed
    dist.destroy_process_group(group)
    return took_s, told


def line_of(case: str) -> str:
    """The line that this rank ends with where rank ODD differs."""
    return error_of(lambda: CASES[case](dist.get_rank() == ODD))


def synced_losses(seeds: list[int]) -> tuple[float, list[str]]:
    """The loss of a model that every rank builds with a seed of its own, and the warnings."""
    made = model(seed=seeds[dist.get_rank()])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options = meshfold.CompileOptions(pins=PINS)
        runs = meshfold.compile(made, CLUSTER, batch(), options=options)
    loss = float(runs.train_step(batch()))
    return loss, [str(w.message) for w in caught if issubclass(w.category, UserWarning)]


def sliced_losses() -> list[float]:
    """Losses of slices by data_rank, and of the global batch."""
    made = compiled()
    rows = 8 // made.num_data_ranks
    first = made.data_rank * rows
    own = {k: x[first : first + rows] for k, x in batch().items()}
    return [float(made.train_step(b)) for b in (own, batch())]


def beyond_vocabulary(family: str, captured: Captured, plan_text: str) -> dict[str, str]:
    """What a step raises under tensor parallelism for a number beyond the vocabulary, by input."""
    made, inputs = tiny_model(family, dtype=torch.float32)
    found = {}
    for name in ("labels", "input_ids"):
        runs = bind(made, plan_from_json(plan_text), captured, inputs)
        wrong = inputs[name].clone()
        wrong[-1, -2] = VOCABULARY + 5
        try:
            runs.train_step({**inputs, name: wrong})
        except IndexError as error:
            found[name] = str(error)
        runs.close()
    return found
