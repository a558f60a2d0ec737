"""Emitted programs for tests, run on simulated ranks and compared with one process."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import meshfold
from meshfold.capture.pipeline import Captured, capture
from meshfold.codegen.emit.region import emit_typed
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.distributed.rank_mesh import RankMesh
from meshfold.ir.strategy import UniformStrategy
from meshfold.passes.region.typing import MeshSearch
from meshfold.runtime.batches import BatchReader
from meshfold.runtime.runner import ProgramRunner
from meshfold.sharding.layout import shard_of
from meshfold.torch_compat.dtypes import torch_dtype
from meshfold.torch_compat.skeletons import copy_with
from meshfold.training.compiled_model import CompiledModel
from meshfold.validation.float64_mode import float64_everywhere
from support.processes.ranks import run_on_simulated_ranks


class Stack(nn.Module):
    """Equal layers of two linears; mean square against a target."""

    def __init__(self, num_layers: int, width: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, dropout) for _ in range(num_layers))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return ((x - target) ** 2).mean()


class Layer(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(x))))


def stack_model(
    num_layers: int = 4, width: int = 8, batch: int = 4, *, dropout: float = 0.0
) -> tuple[nn.Module, dict[str, Tensor]]:
    """A Stack in float64 and a batch for it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Stack(num_layers, width, dropout=dropout).double()
        inputs = {
            "x": torch.randn(batch, width, dtype=torch.float64),
            "target": torch.randn(batch, width, dtype=torch.float64),
        }
    return model, inputs


def emit_uniform(captured: Captured, strategy: UniformStrategy, batch_size: int) -> EmittedProgram:
    """The program of a uniform strategy on processes of this machine."""
    cluster = resolve_cluster("local-cpu", strategy.dp * strategy.tp)
    mesh = build_mesh(cluster, strategy.dp, strategy.tp)
    search = MeshSearch(captured.graph, cluster, mesh, batch_size)
    typed = search.solve(zero=strategy.zero, mode=strategy.tp_mode)
    return emit_typed(captured.graph, typed.typings, search.costs)


@dataclass
class Rank:
    """One simulated rank of a program: its local tensors and its runner."""

    mesh: RankMesh
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]
    runner: ProgramRunner
    reader: BatchReader

    def loss(self, batch: Mapping[str, Any], rng: tuple[int, int] = (0, 0)) -> Tensor:
        inputs = self.reader.read(batch)
        return self.runner.run(self.parameters, self.buffers, inputs, rng=rng)


def on_ranks(
    model: nn.Module, captured: Captured, program: EmittedProgram, body: Callable[[Rank], Any]
) -> list[Any]:
    """`body` on every simulated rank of the program's mesh, weights copied from `model`."""

    def run(mesh: RankMesh) -> Any:
        parameters = {
            p.name: nn.Parameter(local_part(program, p.name, model.get_parameter(p.name), mesh))
            for p in captured.graph.parameters
        }
        held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        buffers = {b.name: held[b.name].detach().clone() for b in captured.graph.buffers}
        runner = ProgramRunner(program, mesh, captured.constants)
        # Whether gradients are recorded is per thread.
        with torch.enable_grad():
            return body(Rank(mesh, parameters, buffers, runner, BatchReader([program], mesh, {})))

    return run_on_simulated_ranks(program.mesh, run, program.levels.node_ranks)


def local_part(program: EmittedProgram, name: str, whole: Tensor, mesh: RankMesh) -> Tensor:
    """A copy of this rank's part of a parameter or its gradient, in the dtype that it is kept
    in."""
    layout = program.stored[name]
    part = shard_of(whole.detach(), layout, program.mesh.sizes, mesh.coords)
    kept = next(p.dtype for p in program.folded.parameters if p.name == name)
    return part.to(torch_dtype(kept), copy=True)


def _copied(tensor: Tensor) -> Tensor:
    return copy.deepcopy(tensor) if tensor.is_leaf else tensor.detach().clone()


def one_process(
    model: nn.Module, batch: Mapping[str, Any]
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """(loss, gradients by name) of a model in float64; the model itself keeps its buffers."""
    model = copy_with(model, _copied)
    model.zero_grad()
    with float64_everywhere():
        output = model(**batch)
        loss: Tensor = getattr(output, "loss", output)
        loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def errors_of_a_step(
    model: nn.Module,
    batch: Mapping[str, Any],
    captured: Captured,
    program: EmittedProgram,
    right: tuple[Tensor, Mapping[str, Tensor | None]] | None = None,
) -> list[dict[str, float]]:
    """The differences from one process by rank, of "loss" and of every gradient by name. The
    program is of a model captured in float64. right: what to compare with, instead of the model."""
    expected, gradients = right or one_process(model, batch)

    def body(rank: Rank) -> dict[str, float]:
        # No rank changes the default dtype, which all threads share.
        loss = rank.loss(batch)
        loss.backward()
        errors = {"loss": float((loss - expected).detach().abs())}
        for name, parameter in rank.parameters.items():
            whole = gradients[name]
            if whole is None:
                whole = torch.zeros_like(model.get_parameter(name))
            mine = local_part(program, name, whole, rank.mesh)
            found = torch.zeros_like(mine) if parameter.grad is None else parameter.grad
            errors[name] = float((found - mine).abs().max()) if mine.numel() else 0.0
        return errors

    return on_ranks(model, captured, program, body)


def gradients(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Gradient of every parameter in one process, zero where there is none."""
    model.zero_grad()
    output = model(**batch)
    getattr(output, "loss", output).backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }


__all__ = [
    "Rank",
    "capture",
    "emit_uniform",
    "gradients",
    "local_part",
    "on_ranks",
    "stack_model",
]


def compiled_stack(**sizes: Any) -> tuple[nn.Module, dict[str, Tensor], CompiledModel]:
    """(model, batch, compiled) on one process: a stack of two layers."""
    model, batch = stack_model(2, **sizes)
    return model, batch, meshfold.compile(model, resolve_cluster("local-cpu", 1), batch)
