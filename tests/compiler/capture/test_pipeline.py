"""capture(): the six families exactly, and what must not be lost or hidden on the way."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.models import hugging_face
from torch import nn

from meshfold.capture.pipeline import Captured, capture
from meshfold.capture.trace.lower import OTHER_NAMES
from meshfold.errors import CaptureError, OptionError
from meshfold.ir.op_graph import Dependence, SourceKind
from meshfold.ops.reference_interpreter import run_graph
from meshfold.ops.registry import torch_target
from meshfold.validation.float64_mode import float64_everywhere

X = {"x": torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(2, 4)}


class Model(nn.Module):
    """A linear layer, then whatever a test wants of its result."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.linear(x))


def run_captured(
    captured: Captured, model: nn.Module, inputs: dict[str, Any]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Loss and the gradient of every parameter, zeros where there is none."""
    outputs = run_graph(
        captured.graph,
        dict(model.named_parameters()),
        dict(model.named_buffers()),
        captured.constants,
        inputs,
    )
    (loss,) = outputs.values()
    return loss, gradients(loss, model)


def gradients(loss: torch.Tensor, model: nn.Module) -> list[torch.Tensor]:
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    pairs = zip(found, model.parameters(), strict=True)
    return [torch.zeros_like(p) if g is None else g for g, p in pairs]


def assert_same_numbers(model: nn.Module, inputs: dict[str, Any], loss: torch.Tensor) -> Captured:
    """The captured program gives `loss` and its gradients to 1e-12."""
    captured = capture(model, inputs)
    found, found_gradients = run_captured(captured, model, inputs)
    torch.testing.assert_close(found, loss, rtol=0, atol=1e-12)
    for mine, theirs in zip(found_gradients, gradients(loss, model), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    return captured


@pytest.mark.parametrize("family", hugging_face.FAMILIES)
def test_loss_and_every_gradient_equal_the_model(family: str) -> None:
    model, inputs = hugging_face.tiny_model(family)
    with float64_everywhere():
        captured = assert_same_numbers(model, inputs, model(**inputs).loss)
    graph = captured.graph
    assert [out.name for out in graph.outputs] == ["loss"]
    assert max(count for _, _, count in graph.runs) == (1 if family == "t5" else 2)
    assert all(p.used for p in graph.parameters)


@pytest.mark.parametrize("family", ["gpt2", "bert", pytest.param("t5", marks=pytest.mark.slow)])
def test_a_tied_weight_is_one_parameter(family: str) -> None:
    model, inputs = hugging_face.tiny_model(family)
    graph = capture(model, inputs).graph
    assert len(graph.parameters) == len(list(model.parameters()))
    assert {a for p in graph.parameters for a in p.aliases} >= (
        {"lm_head.weight"} if family != "bert" else {"cls.predictions.decoder.weight"}
    )


def test_a_meta_model_gives_the_same_graph() -> None:
    model, inputs = hugging_face.tiny_model("llama", dtype=torch.float32)
    real = capture(model, inputs).graph
    assert capture(model.to("meta"), inputs).graph == real


def test_the_users_model_is_untouched() -> None:
    model, inputs = hugging_face.tiny_model("mixtral")
    before = {name: t.clone() for name, t in model.state_dict().items()}
    config = model.config.to_dict()
    capture(model, inputs)
    assert model.config.to_dict() == config
    assert model.config._experts_implementation == "eager"
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_no_grad_detaches_the_gradient() -> None:
    def function(y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = y.exp()
            with torch.enable_grad():
                kept = y.sin()
        return (y * scale + kept).sum()

    model = Model(function)
    assert_same_numbers(model, X, model(**X))


def test_detach_in_place_detaches_later_readers_only() -> None:
    def function(y: torch.Tensor) -> torch.Tensor:
        scale = y.exp()
        early = scale * y
        scale.detach_()
        return (early * y + scale * y).sum()

    model = Model(function)
    eager = model.linear(X["x"])
    # Eager detach_ cuts earlier readers of the same tensor no more than the graph does.
    scale = eager.exp()
    loss = (scale * eager * eager + scale.detach() * eager).sum()
    assert_same_numbers(model, X, loss)


def test_a_value_that_passes_through_no_grad_keeps_its_gradient() -> None:
    def function(y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale, same = y.exp(), y
        return (same * scale).sum()

    model = Model(function)
    assert_same_numbers(model, X, model(**X))


def test_in_place_under_no_grad_is_refused_where_its_gradient_is_used() -> None:
    def function(y: torch.Tensor) -> torch.Tensor:
        y = y.exp()
        with torch.no_grad():
            y.mul_(2)
        return (y * y).sum()

    with pytest.raises(CaptureError, match="aten.mul_.Tensor changes a tensor inside"):
        capture(Model(function), X)


def test_a_straight_through_gradient_is_kept() -> None:
    model = Model(lambda y: ((y + (torch.round(y) - y).detach()) ** 2).sum())
    assert_same_numbers(model, X, model(**X))


def test_type_as_is_a_cast_to_a_dtype() -> None:
    def function(y: torch.Tensor) -> torch.Tensor:
        return (y.float().type_as(y).type_as(y) * y).sum()

    model = Model(function)
    captured = capture(model, X)
    targets = [op.target for r in captured.graph.regions for op in r.graph.ops]
    assert targets.count("aten._to_copy.default") == 2
    assert not any("type_as" in t for t in targets)
    assert_same_numbers(model, X, model(**X))


def test_other_names_of_an_op_are_the_op() -> None:
    def function(y: torch.Tensor) -> torch.Tensor:
        both = torch.concat([torch.multiply(y, 2.0), torch.subtract(y, y.absolute())], -1)
        return torch.clip(both, -1.0, 1.0).divide(3.0).sum()

    model = Model(function)
    targets = {op.target for r in capture(model, X).graph.regions for op in r.graph.ops}
    assert targets >= {"aten.mul.Tensor", "aten.sub.Tensor", "aten.cat.default"}
    assert targets.isdisjoint(OTHER_NAMES)
    assert_same_numbers(model, X, model(**X))


def test_every_op_has_the_arguments_of_its_other_name() -> None:
    for other, name in OTHER_NAMES.items():
        (left, right) = (
            [argument.name for argument in torch_target(op)._schema.arguments]  # type: ignore[attr-defined]
            for op in (other, name)
        )
        assert left == right, other


def test_a_copy_in_place_keeps_the_gradient_of_what_is_copied() -> None:
    def function(y: torch.Tensor) -> torch.Tensor:
        same, wide, row = torch.empty_like(y), torch.empty(y.shape, dtype=torch.float64), y * 1
        same.copy_(y.sin())
        wide.copy_(y.cos())
        row.copy_(y[:1].exp())
        return (same * wide * row).sum()

    model = Model(function)
    captured = capture(model, X)
    assert not any(
        "copy.default" == op.target[5:] for r in captured.graph.regions for op in r.graph.ops
    )
    assert_same_numbers(model, X, model(**X))


def test_gradient_flow_and_dependence_of_values() -> None:
    class Biased(Model):
        def __init__(self) -> None:
            super().__init__(torch.sum)
            self.table = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
            self.register_buffer("scale", torch.ones(4, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            bias = self.table.exp()[0]
            mask = torch.ones_like(x).tril() * self.scale.cos()
            return ((self.linear(x) + bias) * mask).sum() + x.sin().sum()

    model = Biased()
    graph = assert_same_numbers(model, X, model(**X)).graph.regions[0].graph
    by_target = {op.target: graph.values[op.outputs[0]] for op in graph.ops}
    assert by_target["aten.exp.default"].depends is Dependence.PARAMETER
    assert by_target["aten.tril.default"].depends is Dependence.CONSTANT
    assert by_target["aten.cos.default"].depends is Dependence.CONSTANT
    assert by_target["aten.linear.default"].depends is Dependence.BATCH
    assert by_target["aten.linear.default"].requires_grad
    assert not by_target["aten.sin.default"].requires_grad


def test_nested_inputs_are_named_by_path_and_the_rest_is_constant() -> None:
    class Nested(Model):
        def forward(self, pair: Any, options: Any, power: int) -> torch.Tensor:
            y = self.linear(pair[0]) * pair[1]["b"]
            return y.pow(power).sum() if options["on"] else y

    model = Nested(torch.sum)
    x = X["x"]
    graph = capture(model, {"pair": (x, {"b": x}), "options": {"on": True}, "power": 2}).graph
    assert [i.name for i in graph.inputs] == ["pair.0", "pair.1.b"]
    assert graph.outputs[0].shape == ()


def test_outputs_without_a_loss_are_all_captured() -> None:
    captured = capture(Model(lambda y: {"a": y, "b": (y.sin(), None)}), X)
    assert [out.name for out in captured.graph.outputs] == ["a", "b.0"]


def test_no_tensor_input_is_an_option_error() -> None:
    with pytest.raises(OptionError, match="no tensor"):
        capture(Model(torch.sum), {"x": 3})


def test_buffer_updates_are_mutations() -> None:
    class Normed(Model):
        def __init__(self) -> None:
            super().__init__(torch.sum)
            self.norm = nn.BatchNorm1d(4, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.linear(x)).pow(2).sum()

    model, eager = Normed(), Normed()
    eager.load_state_dict(model.state_dict())
    captured = capture(model, X)
    loss, _ = run_captured(captured, model, X)
    torch.testing.assert_close(loss, eager(**X), rtol=0, atol=1e-12)
    for mine, theirs in zip(model.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    (instance,) = captured.graph.instances
    region = captured.graph.regions[0].graph
    updated = {instance.sources[slot].name for slot, _ in region.mutations}
    assert updated == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


def test_dropout_in_training_is_in_the_graph() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.25), nn.Flatten(0), nn.Linear(8, 1))

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).sum()

    inputs = {"x": torch.randn(2, 4)}
    ops = [op for r in capture(Wrapped().train(), inputs).graph.regions for op in r.graph.ops]
    (dropout,) = [op for op in ops if op.target == "aten.native_dropout.default"]
    assert dropout.args[1:] == (0.25, True)
    ops = [op for r in capture(Wrapped().eval(), inputs).graph.regions for op in r.graph.ops]
    assert not [op for op in ops if "dropout" in op.target]


def test_equal_constants_are_one_and_keep_their_value() -> None:
    def function(y: torch.Tensor) -> torch.Tensor:
        a, b = torch.tensor(2.5, dtype=torch.float64), torch.tensor(2.5, dtype=torch.float64)
        return (y * a).sum() + (y * b).sum() * torch.tensor(3.0, dtype=torch.float64)

    model = Model(function)
    captured = assert_same_numbers(model, X, model(**X))
    assert sorted(t.item() for t in captured.constants.values()) == [2.5, 3.0]


def test_unused_parameters_are_noted() -> None:
    model = Model(torch.sum)
    model.spare = nn.Linear(3, 3)
    graph = capture(model, X).graph
    assert [p.name for p in graph.parameters if not p.used] == ["spare.weight", "spare.bias"]
    assert any("spare.weight, spare.bias" in note for note in graph.notes)


def line_of(function: Callable[..., Any], offset: int) -> str:
    return f"{__file__}:{function.__code__.co_firstlineno + offset}"


def test_a_branch_on_a_value_is_refused_with_its_line() -> None:
    def function(y: torch.Tensor) -> torch.Tensor:
        if y.sum() > 0:
            return y.sum()
        return y.exp().sum()

    with pytest.raises(CaptureError, match="branch depends on the value") as caught:
        capture(Model(function), X)
    assert caught.value.op == "Tensor.__bool__"
    assert caught.value.source == line_of(function, 1)


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_randomness_outside_torch_is_refused_with_its_line(draw: Callable[[], float]) -> None:
    def function(y: torch.Tensor) -> torch.Tensor:
        scale = 2.0
        scale += draw()
        return (y * scale).sum()

    with pytest.raises(CaptureError, match="random numbers outside torch") as caught:
        capture(Model(function), X)
    assert caught.value.source == line_of(function, 2)


def test_an_op_with_data_dependent_shape_is_refused_with_its_line() -> None:
    def function(y: torch.Tensor) -> torch.Tensor:
        return y.nonzero().float().sum() + y.sum()

    with pytest.raises(CaptureError) as caught:
        capture(Model(function), X)
    assert "nonzero" in caught.value.op
    assert caught.value.source == line_of(function, 1)


def test_a_ctc_loss_of_targets_all_in_a_row_is_refused_with_its_line() -> None:
    lengths = torch.tensor([2, 2])

    def function(y: torch.Tensor) -> torch.Tensor:
        logits = y.log_softmax(-1)[:, None].expand(2, 2, 4)
        return nn.functional.ctc_loss(
            logits, torch.ones(2, dtype=torch.long), lengths, lengths // 2
        )

    with pytest.raises(CaptureError) as caught:
        capture(Model(function), X)
    assert "ctc_loss" in caught.value.op
    assert caught.value.source == line_of(function, 2)


def test_reading_a_number_out_of_a_tensor_is_refused() -> None:
    with pytest.raises(CaptureError, match="Tensor.item gives a shape or a number"):
        capture(Model(lambda y: (y * y.sum().item()).sum()), X)


def test_a_parameter_that_is_not_registered_is_refused() -> None:
    hidden = [nn.Parameter(torch.ones(4, dtype=torch.float64))]
    with pytest.raises(CaptureError, match="no registered parameter"):
        capture(Model(lambda y: (y * hidden[0]).sum()), X)


def test_an_error_of_the_model_itself_names_the_line() -> None:
    def function(y: torch.Tensor) -> torch.Tensor:
        return y @ torch.ones(3, 3, dtype=torch.float64)

    with pytest.raises(CaptureError) as caught:
        capture(Model(function), X)
    assert caught.value.source == line_of(function, 1)


def test_sources_and_scopes_lead_back_to_the_user() -> None:
    (region,) = capture(Model(lambda y: y.exp().sum()), X).graph.regions
    ops = {op.target: op for op in region.graph.ops}
    assert ops["aten.exp.default"].source == line_of(Model.forward, 1)
    assert ops["aten.linear.default"].scope == "linear"


def test_every_source_is_a_canonical_name() -> None:
    model, inputs = hugging_face.tiny_model("bert")
    graph = capture(model, inputs).graph
    kinds = (SourceKind.PARAMETER, SourceKind.BUFFER, SourceKind.INPUT)
    infos = (graph.parameters, graph.buffers, graph.inputs)
    known = {kind: {i.name for i in of_kind} for kind, of_kind in zip(kinds, infos, strict=True)}
    for source in (s for i in graph.instances for s in i.sources):
        assert source.kind not in known or source.name in known[source.kind]
