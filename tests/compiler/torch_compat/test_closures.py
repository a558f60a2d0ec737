"""Functions that a copy of a model keeps read the copy, not the model."""

import torch
from support.programs.local_programs import emit_uniform, errors_of_a_step, one_process
from torch import Tensor, nn

from meshfold.capture.pipeline import capture
from meshfold.ir.strategy import UniformStrategy
from meshfold.torch_compat.skeletons import meta_copy
from meshfold.validation.float64_mode import float64_everywhere


class Closed(nn.Module):
    """A head that is a function of the embedding, features that hooks put into a dict, one function
    as two hooks, a default, and functions that have nothing of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = lambda x: x @ self.embedding.weight.t()
        self.scaled = lambda x, layer=self.layers[0]: x * layer.weight.mean()
        self.plain = [torch.tanh, lambda x: x + 1]
        self.seen: dict[int, Tensor] = {}

        def keep(number: int) -> object:
            def hook(module: nn.Module, args: object, output: Tensor) -> None:
                self.seen[number] = output

            return hook

        for number, layer in enumerate(self.layers):
            layer.register_forward_hook(keep(number))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        x = self.plain[1](self.scaled(x))
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return loss + sum(x.square().mean() for x in self.seen.values())


def test_a_copy_reads_its_own_modules() -> None:
    model = Closed()
    copied = meta_copy(model)
    assert copied.head(torch.ones(2, 8, device="meta")).is_meta
    assert copied.scaled(torch.ones(2, device="meta")).is_meta
    assert copied.plain[1] is model.plain[1]
    assert copied.head.__qualname__ == model.head.__qualname__
    copied.layers[0](torch.ones(2, 8, device="meta"))
    assert list(copied.seen) == [0]
    assert not model.seen


def test_what_functions_compute_is_that_of_one_process() -> None:
    torch.manual_seed(0)
    model = Closed().double()
    ids, labels = torch.randint(0, 16, (2, 4, 6))
    batch = {"ids": ids, "labels": labels}
    with float64_everywhere():
        captured = capture(model, batch)
    assert not model.seen
    assert torch.equal(one_process(model, batch)[0], model(**batch))
    for strategy in (UniformStrategy(dp=2, zero=3), UniformStrategy(dp=2, tp=2)):
        program = emit_uniform(captured, strategy, 4)
        for errors in errors_of_a_step(model, batch, captured, program):
            assert max(errors.values()) < 1e-12
