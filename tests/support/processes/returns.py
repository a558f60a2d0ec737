"""Steps that return more than their loss, and forward passes without labels, on the ranks of a
pool, held against one process."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import meshfold
from meshfold.capture.trace.loss_function import call_model
from meshfold.capture.trace.returned import name_outputs
from meshfold.sharding.layout import shard_of
from meshfold.training.shards.local_shard import local_tensor
from meshfold.validation.float64_mode import float64_everywhere
from support.models.returns import classifier, decoder
from support.processes.batch_sizes import stored_layouts

Case = tuple[str, Mapping[str, Any], Mapping[str, Any]]
"""(form, pins, other options)."""


def difference(found: Any, right: Any) -> float:
    """The largest difference of two returned values, which have the same tensors and classes."""
    mine, theirs = name_outputs(found), name_outputs(right)
    assert type(found) is type(right) and mine.keys() == theirs.keys(), (mine, theirs)
    return max(float((_whole(x) - theirs[n]).detach().abs().max()) for n, x in mine.items())


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def gradient_difference(compiled: meshfold.CompiledModel, model: nn.Module) -> float:
    """Of every gradient of this rank."""
    stored = stored_layouts(compiled)
    worst = 0.0
    for name, parameter in compiled.named_parameters():
        right = model.get_parameter(name).grad
        assert right is not None and parameter.grad is not None, name
        mesh = compiled.plan.mesh
        mine = shard_of(right, stored[name], mesh.sizes, compiled.rank_mesh.coords)
        worst = max(worst, float((local_tensor(parameter.grad) - mine).abs().max()))
    return worst


def case_errors(form: str, pins: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, float]:
    """Of one case: what a step and forward passes return, and gradients."""
    model, batch = decoder(form)
    options = meshfold.CompileOptions(pins=pins, **more)
    cluster = f"local-cpux{dist.get_world_size()}"
    errors: dict[str, float] = {}
    with float64_everywhere():
        compiled = meshfold.compile(model, cluster, tuple(batch.values()), options=options)
        expected = model(**batch)
        loss = sum(x for x in name_outputs(expected).values() if not x.dim())
        loss.backward()
        is_asked = bool(more.get("outputs"))
        right = expected if is_asked else loss
        if form == "losses" and is_asked:
            right = type(compiled.train_step(batch))(loss, expected)
            compiled.zero_grad()
        errors["step"] = difference(compiled.train_step(tuple(batch.values())), right)
        errors["gradients"] = gradient_difference(compiled, model)
        if compiled.plan.schedule:
            compiled.close()
            return errors
        errors["forward"] = difference(compiled(batch["idx"], targets=batch["targets"]), right)
        compiled.eval()
        for idx in (batch["idx"], batch["idx"][:, :5], batch["idx"][:3]):
            with torch.no_grad():
                found = difference(compiled(idx), model(idx))
            errors["logits"] = max(errors.get("logits", 0.0), found)
    compiled.close()
    return errors


def largest_errors(cases: list[Case]) -> list[dict[str, float]]:
    """By case."""
    return [case_errors(*case) for case in cases]


def criterion_errors(pins: Mapping[str, Any]) -> dict[str, float]:
    """Of a classifier with running statistics: a step with a loss function outside of the model,
    then accuracy in eval mode."""
    model, batch, loss_fn = classifier()
    options = meshfold.CompileOptions(pins=pins, outputs="all")
    cluster = f"local-cpux{dist.get_world_size()}"
    with float64_everywhere():
        compiled = meshfold.compile(model, cluster, batch, options=options, loss_fn=loss_fn)
        expected = call_model(model, batch, loss_fn)
        expected.loss.backward()
        errors = {"step": difference(compiled.train_step(batch), expected)}
        errors["gradients"] = gradient_difference(compiled, model)
        compiled.eval()
        model.eval()
        with torch.no_grad():
            errors["logits"] = difference(compiled(batch["input"]), model(batch["input"]))
            errors["eval"] = difference(compiled(**batch), call_model(model, batch, loss_fn))
    return errors
