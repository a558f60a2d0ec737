"""MODEL in the sizes and precisions that plans ask for, each captured once."""

from dataclasses import replace

from meshfold.api import capture_model, on_cluster, plan_captured
from meshfold.capture.pipeline import Captured
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.options import CompileOptions, Precision
from meshfold.ir.plan import Plan
from meshfold.memory_probe.prober import OpProber
from meshfold.models.from_argument import BuiltModel, build_model
from meshfold.passes.planner.find import Progress


class CapturedModels:
    """Plans one MODEL again and again. default_batch: of a configuration without --batch."""

    def __init__(self, model: str, default_batch: int) -> None:
        self._model, self._default_batch = model, default_batch
        self._built: dict[tuple[int | None, int | None], BuiltModel] = {}
        self._captured: dict[tuple[int | None, int | None, Precision], Captured] = {}
        self._probe = OpProber()

    def plan(
        self,
        cluster: ClusterSpec,
        options: CompileOptions,
        *,
        batch: int | None = None,
        sequence: int | None = None,
        progress: Progress | None = None,
    ) -> Plan:
        """The best plan. options: their loss, outputs and capture options are the same in all
        calls. Errors as of api.find_plan and build_model."""
        sizes = batch, sequence
        if sizes not in self._built:
            self._built[sizes] = build_model(
                self._model, batch=batch, sequence=sequence, default_batch=self._default_batch
            )
        built = self._built[sizes]
        options = on_cluster(cluster, replace(options, custom_rules=built.rules))
        key = (*sizes, options.captured_precision)
        if key not in self._captured:
            self._captured[key] = capture_model(
                built.model, built.example_inputs, options, built.loss_fn
            )
        return plan_captured(
            self._captured[key],
            type(built.model).__name__,
            cluster,
            options,
            progress=progress,
            probe=self._probe,
        )
