"""What a step of a compiled model returns, on one device."""

import torch
from support.models.returns import Output, Record, decoder

import meshfold
from meshfold.capture.trace.loss_function import LossAndOutputs
from meshfold.ir.options import CompileOptions
from meshfold.validation.float64_mode import float64_everywhere


def compiled(form: str, **options: object) -> tuple[object, object, meshfold.CompiledModel]:
    """What a step returns, what the model does, and the compiled model."""
    model, batch = decoder(form)
    with float64_everywhere():
        made = meshfold.compile(
            model,
            "local-cpux1",
            batch,
            options=CompileOptions(**options),  # type: ignore[arg-type]
        )
        return made(**batch), model(**batch), made


def test_the_loss_alone_by_default() -> None:
    found, right, _ = compiled("record")
    assert isinstance(found, torch.Tensor) and isinstance(right, Record)
    assert torch.equal(found, right.loss)


def test_the_model_s_own_class_with_what_was_asked_for() -> None:
    found, right, made = compiled("output", outputs=("loss", "logits"))
    assert isinstance(found, Output) and isinstance(right, Output)
    assert [*found] == ["loss", "logits"]
    assert torch.allclose(found.logits, right.logits, rtol=0, atol=1e-15)
    found.loss.backward()
    detached = made.train_step(decoder()[1])
    assert isinstance(detached, Output) and not detached.logits.requires_grad


def test_a_gradient_flows_through_outputs() -> None:
    found, right, made = compiled("tuple", outputs="all")
    (found[1] + found[0].square().mean()).backward()
    (right[1] + right[0].square().mean()).backward()
    model, _ = decoder("tuple")
    assert torch.allclose(made.get_parameter("head.weight").grad, _gradient(right, model))


def _gradient(right: tuple[torch.Tensor, torch.Tensor], model: torch.nn.Module) -> torch.Tensor:
    """Of the same sum in one process."""
    _, batch = decoder()
    logits, loss = model(**batch)
    (loss + logits.square().mean()).backward()
    return model.get_parameter("head.weight").grad


def test_a_sum_of_losses_stands_beside_what_the_model_returns() -> None:
    found, right, _ = compiled("losses", loss="losses.cls + losses.size", outputs="all")
    assert isinstance(found, LossAndOutputs)
    loss = right["losses"]["cls"] + right["losses"]["size"]
    assert torch.allclose(found.loss, loss, rtol=0, atol=1e-15)
    assert found.outputs.keys() == right.keys()


def test_on_one_device_shards_are_tensors() -> None:
    found, right, _ = compiled("tuple", outputs="all", sharded_outputs=True)
    assert type(found[0]) is torch.Tensor and found[0].shape == right[0].shape
