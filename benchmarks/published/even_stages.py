"""Pipelines as frameworks cut them: like numbers of layers in every stage. A search may give fewer
to the stage with the head."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from meshfold.cost_models.pipeline.schedules import Schedule
from meshfold.passes.stages import search
from meshfold.passes.stages.boundaries import BoundarySearch
from meshfold.passes.stages.problem import StageProblem
from meshfold.passes.stages.virtual_stages import VirtualStageSearch


def even_boundaries(problem: StageProblem, schedule: Schedule) -> tuple[int, ...] | None:
    """The first layer of each stage and the number of layers: the same number of repeated layers in
    all, the embedding with the first and the head with the last. Where stages do not divide these,
    but them and one each for embedding and head, these count as layers (as Llama 3 was cut, arXiv
    2407.21783, section 3.3.2). None where neither does."""
    counts = [run.count for run in problem.runs]
    repeated, stages = max(counts), schedule.num_stages
    first = sum(counts[: counts.index(repeated)])
    if repeated % stages == 0:
        inner = [first + s * repeated // stages for s in range(1, stages)]
    elif (repeated + 2) % stages == 0 and repeated + 2 > stages:
        inner = [first - 1 + s * (repeated + 2) // stages for s in range(1, stages)]
    else:
        return None
    return (0, *inner, problem.num_layers)


class _Boundaries(BoundarySearch):
    """Tries the even division alone."""

    def close(self, limit_s: float, tolerance: float) -> None:
        even = even_boundaries(self.problem, self.schedule)
        if even is None:
            super().close(limit_s, tolerance)
        else:
            self.try_boundaries(even)
            self.bound_s = self.step_s


class _VirtualStages(VirtualStageSearch):
    """Tries the even division alone."""

    def close(self, limit_s: float, tolerance: float) -> None:
        even = even_boundaries(self.problem, self.schedule)
        if even is None:
            super().close(limit_s, tolerance)
        else:
            self.try_divisions(self.solver, [even])
            self.bound_s = self.step_s


@contextmanager
def even_stages() -> Iterator[None]:
    """Plans that are made inside have even stages."""
    with (
        patch.object(search, "BoundarySearch", _Boundaries),
        patch.object(search, "VirtualStageSearch", _VirtualStages),
    ):
        yield
