"""MODEL in the sizes and precisions that plans ask for, each captured once."""

from dataclasses import replace

from meshfold.api import capture_model, on_cluster, plan_captured
from meshfold.capture.pipeline import Captured
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.options import CompileOptions, Precision
from meshfold.ir.plan import Plan
from meshfold.memory_probe.prober import OpProber
from meshfold.models.from_argument import BuiltModel, build_model
from meshfold.passes.planner.best_mesh import Progress
from meshfold.passes.planner.shared_work import SharedWork


class CapturedModels:
    """Plans one MODEL again and again. default_batch: of a configuration without --batch."""

    def __init__(self, model: str, default_batch: int) -> None:
        self._model, self._default_batch = model, default_batch
        self._built: dict[tuple[int | None, int | None], BuiltModel] = {}
        self._captured: dict[tuple[int | None, int | None, Precision], Captured] = {}
        self._probe = OpProber()
        self._shared: list[tuple[Captured, ClusterSpec, SharedWork]] = []

    def captured(
        self, options: CompileOptions, *, batch: int | None = None, sequence: int | None = None
    ) -> Captured:
        """The model for such a batch. options: with a precision; what they say of the loss and of
        outputs is the same in all calls. Raises CaptureError, and what build_model raises."""
        built = self._build(batch, sequence)
        key = (batch, sequence, options.captured_precision)
        if key not in self._captured:
            given = replace(options, custom_rules=built.rules)
            self._captured[key] = capture_model(
                built.model, built.example_inputs, given, built.loss_fn
            )
        return self._captured[key]

    def plan(
        self,
        cluster: ClusterSpec,
        options: CompileOptions,
        *,
        batch: int | None = None,
        sequence: int | None = None,
        progress: Progress | None = None,
    ) -> Plan:
        """The best plan. Errors as of api.find_plan and build_model."""
        built = self._build(batch, sequence)
        options = on_cluster(cluster, replace(options, custom_rules=built.rules))
        captured = self.captured(options, batch=batch, sequence=sequence)
        return plan_captured(
            captured,
            type(built.model).__name__,
            cluster,
            options,
            progress=progress,
            probe=self._probe,
            shared=self._shared_with(captured, cluster),
        )

    def _shared_with(self, captured: Captured, cluster: ClusterSpec) -> SharedWork:
        """What earlier plans of this graph on an equal cluster left."""
        for graph, known, shared in self._shared:
            if graph is captured and known == cluster:
                return shared
        shared = SharedWork()
        self._shared.append((captured, cluster, shared))
        return shared

    def _build(self, batch: int | None, sequence: int | None) -> BuiltModel:
        sizes = batch, sequence
        if sizes not in self._built:
            self._built[sizes] = build_model(
                self._model, batch=batch, sequence=sequence, default_batch=self._default_batch
            )
        return self._built[sizes]
