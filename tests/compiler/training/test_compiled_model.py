"""CompiledModel on one device: an nn.Module like the original."""

import copy
import io
from collections.abc import Callable

import pytest
import torch
from support.models.hugging_face import tiny_model
from support.processes.pool import Pools
from support.programs.local_programs import compiled_stack, stack_model
from torch import Tensor, nn

import meshfold
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.errors import MeshfoldError, OptionError
from meshfold.training.compiled_model import CompiledModel

ONE = resolve_cluster("local-cpu", 1)


def test_one_device_needs_no_process_group() -> None:
    model, batch, compiled = compiled_stack()
    loss, expected = compiled(**batch), model(**batch)
    loss.backward()
    expected.backward()
    assert float((loss - expected).detach()) == pytest.approx(0.0, abs=1e-15)
    for name, parameter in model.named_parameters():
        assert torch.allclose(compiled.get_parameter(name).grad, parameter.grad, atol=1e-14)


def test_a_copy_has_parameters_of_its_own_and_trains_beside_the_original() -> None:
    model, batch, compiled = compiled_stack()
    compiled.train_step(batch)
    twin = copy.deepcopy(compiled)
    with torch.no_grad():
        for parameter in (*twin.parameters(), *(again := copy.deepcopy(model)).parameters()):
            parameter.mul_(0.5)
    assert torch.allclose(twin.train_step(batch), again(**batch), rtol=0, atol=1e-14)
    again(**batch).backward()
    model(**batch).backward()
    for name, parameter in model.named_parameters():
        for made, right in ((compiled, parameter), (twin, again.get_parameter(name))):
            assert torch.allclose(made.get_parameter(name).grad, right.grad, rtol=0, atol=1e-14)


def test_averages_of_weights_are_those_of_the_model_itself() -> None:
    model, batch, compiled = compiled_stack()
    averages = [torch.optim.swa_utils.AveragedModel(m) for m in (model, compiled)]
    for scale in (1.0, 0.5, 0.25):
        for made, average in zip((model, compiled), averages, strict=True):
            with torch.no_grad():
                for parameter in made.parameters():
                    parameter.mul_(scale)
            average.update_parameters(made)
    with torch.no_grad():
        right, found = (average(**batch) for average in averages)
    assert torch.allclose(found, right, rtol=0, atol=1e-14)


def test_a_compiled_model_is_not_pickled() -> None:
    *_, compiled = compiled_stack()
    with pytest.raises(OptionError, match="is not pickled: .*save_checkpoint or its state_dict"):
        torch.save(compiled, io.BytesIO())


CHANGES: dict[str, tuple[Callable[[CompiledModel], object], str]] = {
    "dtype": (lambda m: m.half(), r"is float16\[.*\] on this rank, and was compiled as float64"),
    "shape": (
        lambda m: setattr(m.get_submodule("layers.0.up"), "bias", nn.Parameter(torch.ones(3))),
        r"layers.0.up.bias is float32\[3\] on this rank, and was compiled as float64",
    ),
    "added": (lambda m: m.add_module("more", nn.Linear(2, 2)), "more.weight was put into the"),
    "meta": (lambda m: m.to("meta"), "layers.0.up.weight is on the meta device on this rank"),
    "removed": (lambda m: delattr(m, "layers"), "was taken out of the compiled model"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_is_changed_after_compile_is_refused(change: str) -> None:
    _, batch, compiled = compiled_stack()
    changes, message = CHANGES[change]
    changes(compiled)
    with pytest.raises(OptionError, match=f"{message}.*before meshfold.compile"):
        compiled.train_step(batch)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).square().mean()


def test_a_batch_may_be_the_only_argument_and_what_is_no_tensor_is_refused() -> None:
    x = torch.randn(2, 4)
    compiled = meshfold.compile(Scaled(), ONE, x)
    assert compiled.train_step(x) == compiled.train_step({"x": x})
    for wrong, shown in ((None, "None"), (x.numpy(), "of type ndarray"), ([[0.0] * 4], ".*=0.0")):
        with pytest.raises(OptionError, match=f"argument x[.=0-9]*{shown}.* was not captured"):
            compiled.train_step({"x": wrong})


def test_a_step_that_trains_nothing_is_refused() -> None:
    _, batch, compiled = compiled_stack()
    with torch.inference_mode(), pytest.raises(OptionError, match=r"train_step under torch.infer"):
        compiled.train_step(batch)
    compiled.requires_grad_(False)
    with pytest.raises(OptionError, match="requires a gradient: every parameter is frozen"):
        compiled.train_step(batch)


def test_symmetric_memory_needs_a_job() -> None:
    *_, compiled = compiled_stack()
    with pytest.raises(OptionError, match="symmetric memory is for a model that runs"):
        compiled.use_symmetric_memory()


def test_dropout_follows_the_mode_and_the_step() -> None:
    model, batch, compiled = compiled_stack(dropout=0.5)
    losses = [float(compiled(**batch).detach()) for _ in range(2)]
    assert losses[0] != losses[1]
    compiled.eval()
    assert torch.equal(compiled(**batch), model.eval()(**batch))
    compiled.train()
    compiled.num_forwards = 0
    assert float(compiled(**batch).detach()) == losses[0], "the step decides the mask"


def test_a_model_captured_without_dropout_does_not_start_dropping() -> None:
    model, batch = stack_model(2, dropout=0.5)
    compiled = meshfold.compile(model.eval(), ONE, batch)
    with pytest.raises(OptionError, match=r"captured in eval mode, without dropout; call model.tr"):
        compiled.train()
    plain = meshfold.compile(stack_model(2)[0].eval(), ONE, batch)
    assert plain.train().training, "nothing depends on the mode"


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1.0)
        return self.linear(x).mean() * self.steps


def test_buffers_are_updated_after_the_step() -> None:
    compiled = meshfold.compile(Counting(), ONE, {"x": torch.randn(2, 4)})
    x = torch.randn(2, 4)
    first = float(compiled(x=x).detach())
    assert float(compiled(x=x).detach()) == pytest.approx(2 * first)
    assert float(compiled.steps) == 2.0
    assert float(compiled.state_dict()["steps"]) == 2.0
    compiled.eval()
    with pytest.raises(OptionError, match=r"updates buffers .* evaluate it under torch.no_grad"):
        compiled(x=x)


def test_without_processes_a_larger_plan_is_for_inspection() -> None:
    model, batch = stack_model(2)
    compiled = meshfold.compile(model, resolve_cluster("local-cpu", 2), batch)
    assert compiled.plan.world_size == 2
    assert compiled.program.text(1).startswith("rank 1 of 2")
    with pytest.raises(MeshfoldError, match="runs on 2 processes and there is no process group"):
        compiled(**batch)


class Clashing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.program = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.program(x).mean()


def test_a_name_of_ours_in_the_model_is_refused() -> None:
    with pytest.raises(MeshfoldError, match="calls a submodule 'program', which is an attribute"):
        meshfold.compile(Clashing(), ONE, {"x": torch.randn(2, 4)})


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_model_on_meta_starts_alike_under_any_plan(pools: Pools) -> None:
    family = "llama"
    digests = [
        *pools.run(2, "support.programs.emit:initial_sums", family, {"dp": 2, "zero": 3}),
        *pools.run(2, "support.programs.emit:initial_sums", family, {"tp": 2, "sp": 1}),
    ]
    assert all(d == digests[0] for d in digests)
    assert len(digests[0]) == len(tiny_model(family)[0].state_dict())


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_closed_model_gives_its_threads_back(pools: Pools) -> None:
    for first, second, third, after in pools.run(
        2, "support.programs.emit:threads_beside_models", 3
    ):
        assert first == second == third
        assert after < first


@pytest.mark.multiprocess
def test_no_step_is_left_behind(pools: Pools) -> None:
    assert pools.run(2, "support.programs.emit:steps_left_behind", {"dp": 2, "zero": 3}) == [0, 0]
