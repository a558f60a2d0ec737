"""Random (model, cluster, budget) without a pin: what the search really picks is emitted, trained
for two steps on processes, and held against one process.

What wins hangs on the machine and on the budget, so both are drawn: the rate of links in a node and
of the network over five decades, start-up costs or none, a node or two, and memory as a share of
what the plan without a budget needs. Everything follows from one seed.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.api import bind, plan_captured
from meshfold.capture.pipeline import Captured, capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.errors import InfeasibleError
from meshfold.ir.cluster import ClusterSpec, NodeGroup
from meshfold.ir.options import CompileOptions, ModeChoice
from meshfold.ir.plan import Plan
from meshfold.plan_file.io import plan_from_json
from meshfold.training.compiled_model import CompiledModel
from meshfold.training.shards.local_shard import local_tensor
from meshfold.validation.float64_mode import float64_everywhere
from support.models.hugging_face import tiny_model
from support.programs.emit import part_of
from support.programs.pipeline import without_start_up

FAMILIES = ("gpt2", "llama", "bert", "t5", "vit", "mixtral")
NUM_STEPS = 2
SHARES = (None, None, 0.9, 0.8, 0.7, 0.5, 0.35)
"""Of what the plan without a budget holds beside the reserve."""
NUM_ALIKE = 5
"""Draws in a row that have one model, so that it is captured once."""


@dataclass(frozen=True)
class FreeDraw:
    """All that a plan is asked for. share: of SHARES."""

    seed: int
    family: str
    layers: int
    cluster: ClusterSpec
    share: float | None
    optimizer: str
    allow_offload: bool
    mode: ModeChoice

    @property
    def text(self) -> str:
        links = (
            f"{self.cluster.groups[0].link.bytes_per_s:.0e}, {self.cluster.network.bytes_per_s:.0e}"
        )
        return (
            f"{self.seed}: {self.family} of {self.layers} layers on {self.cluster.num_nodes} x "
            f"{self.cluster.groups[0].devices_per_node}, links {links}, share {self.share}, "
            f"{self.optimizer}, {self.mode}{', offload' * self.allow_offload}"
        )


def free_draw(seed: int) -> FreeDraw:
    """The draw of a seed."""
    draw, model = random.Random(seed), seed // NUM_ALIKE
    return FreeDraw(
        seed,
        FAMILIES[model % len(FAMILIES)],
        (2, 4, 3)[model // len(FAMILIES) % 3],
        _cluster(draw),
        draw.choice(SHARES),
        draw.choice(["adamw", "adamw", "sgd"]),
        draw.random() < 0.15,
        draw.choice(["auto", "eager", "scheduled"]),
    )


def _cluster(draw: random.Random) -> ClusterSpec:
    num_nodes, per_node = draw.choice([(1, 2), (1, 2), (1, 3), (1, 4), (1, 4), (2, 2), (2, 2)])
    found = resolve_cluster("local-cpu", per_node)
    if draw.random() < 0.7:
        found = without_start_up(found)
    (group,) = found.groups
    link = replace(group.link, bytes_per_s=10 ** draw.uniform(6, 11))
    slower = replace(link, name="between", bytes_per_s=link.bytes_per_s * 10 ** -draw.uniform(0, 2))
    device = replace(group.device, host_bytes_per_s=1e10, host_memory_bytes_per_s=1e10)
    return replace(found, groups=(NodeGroup(device, num_nodes, per_node, link),), network=slower)


@lru_cache(maxsize=4)
def captured_model(family: str, layers: int) -> Captured:
    """What is captured of a tiny model in float64."""
    with float64_everywhere():
        return capture(*tiny_model(family, layers=layers))


def plan_of(draw: FreeDraw) -> Plan:
    """What the search picks. Raises InfeasibleError where nothing fits the budget."""
    captured = captured_model(draw.family, draw.layers)
    options = CompileOptions(
        optimizer=draw.optimizer, allow_offload=draw.allow_offload, mode=draw.mode
    )
    plan = plan_captured(captured, draw.family, draw.cluster, options)
    if draw.share is None:
        return plan
    reserve = draw.cluster.reserve_bytes
    budget = reserve + int(draw.share * (plan.memory.peak - reserve))
    return plan_captured(captured, draw.family, draw.cluster, replace(options, memory_bytes=budget))


def plan_that_fits(draw: FreeDraw) -> Plan | None:
    """The same; None where nothing fits."""
    try:
        return plan_of(draw)
    except InfeasibleError:
        return None


def kinds_of(plan: Plan) -> set[str]:
    """What of the space a plan uses, in words."""
    found: set[str] = set()
    for region in plan.regions:
        s = region.strategy
        used = {
            "dp": s.dp > 1,
            "tp": s.tp > 1,
            "sp": s.sequence_parallel,
            "ep": s.ep > 1,
            "cp": s.cp > 1,
            "pp": s.pp > 1,
            "accumulation": s.pp == 1 and s.microbatches > 1,
            "hsdp": s.dp_shard > 0,
            f"zero {s.zero}": s.zero > 0,
            f"recompute {s.recompute}": s.recompute != "none",
            "offload": s.offload != "none",
            "micro-chunks": region.chunking.count > 1,
        }
        found |= {name for name, is_used in used.items() if is_used}
    return found | ({plan.schedule.partition("(")[0]} if plan.schedule else set())


def errors_of_steps(seed: int, captured: Captured, plan_text: str) -> dict[str, float]:
    """Differences of this rank from one process after NUM_STEPS steps, relative to the largest
    entry of a tensor or to a thousandth of the largest of any: the loss, every gradient, and every
    parameter after the updates."""
    draw = free_draw(seed)
    model, batch = tiny_model(draw.family, layers=draw.layers)
    compiled = bind(model, plan_from_json(plan_text), captured, batch)
    optimizers = [_optimizer(draw, m) for m in (model, compiled)]
    errors: dict[str, float] = {}
    with float64_everywhere():
        for _ in range(NUM_STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            expected, loss = model(**batch).loss, _loss(compiled, batch)
            expected.backward()
            errors["loss"] = _larger(errors, "loss", float((loss - expected).detach().abs()))
            _compare(errors, "gradient", compiled, model, _gradient)
            for optimizer in optimizers:
                optimizer.step()
            _compare(errors, "parameter", compiled, model, lambda p: local_tensor(p.detach()))
    compiled.close()
    return errors


def _loss(compiled: CompiledModel, batch: Mapping[str, Any]) -> Tensor:
    if compiled.plan.schedule:
        return compiled.train_step(batch)
    loss: Tensor = compiled(**batch)
    loss.backward()
    return loss.detach()


def _optimizer(draw: FreeDraw, model: nn.Module) -> torch.optim.Optimizer:
    if draw.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=1e-2)
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)


def _larger(errors: Mapping[str, float], name: str, error: float) -> float:
    """A NaN is the largest."""
    known = errors.get(name, 0.0)
    return error if not error <= known else known


def _compare(
    errors: dict[str, float], what: str, compiled: CompiledModel, model: nn.Module, part: Any
) -> None:
    floor = 1e-3 * max(float(part(p).abs().max()) for p in model.parameters())
    for name, parameter in compiled.named_parameters():
        canonical = compiled._canonical[name]
        whole = part(model.get_parameter(canonical))
        right = part_of(compiled, canonical, whole)
        error = (part(parameter) - right.to(parameter.device)).abs().max() if right.numel() else 0.0
        relative = float(error) / max(floor, float(whole.abs().max()))
        errors[f"{what} of {name}"] = _larger(errors, f"{what} of {name}", relative)


def _gradient(parameter: Tensor) -> Tensor:
    return local_tensor(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
