"""Values for models on the meta device, module by module."""

import copy
import weakref

import pytest
import torch
import transformers
from support.models.hugging_face import FAMILIES, tiny_model
from torch import Tensor, nn

from meshfold.errors import MeshfoldError
from meshfold.training.shards.initialization import initial_values

CPU = torch.device("cpu")


def on_meta(family: str) -> nn.Module:
    model, _ = tiny_model(family)
    twin = copy.deepcopy(model).to("meta")
    # Moving keeps ties of Hugging Face models apart.
    if isinstance(twin, transformers.PreTrainedModel):
        twin.tie_weights()
    return twin


def names_of(model: nn.Module) -> list[str]:
    return [n for n, _ in (*model.named_parameters(), *model.named_buffers())]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_on_meta_is_initialised_as_its_own_code_does(family: str) -> None:
    model = on_meta(family)
    names = names_of(model)
    found = dict(initial_values(model, names, seed=0, device=CPU))
    assert sorted(found) == sorted(names)
    assert all(t.is_meta for t in model.parameters()), "the model given stays on meta"
    fresh, _ = tiny_model(family)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        fresh.init_weights()
        fresh.apply(fresh._init_weights)
    for name, buffer in fresh.named_buffers():
        assert torch.equal(found[name], buffer), name
    for name, parameter in fresh.named_parameters():
        if parameter.numel() >= 256:
            spread = float(found[name].std() / parameter.detach().std())
            assert 0.7 < spread < 1.4, name
        elif parameter.detach().unique().numel() == 1:
            assert torch.equal(found[name], parameter), name


def test_values_depend_on_the_seed_and_nothing_else() -> None:
    model = on_meta("gpt2")
    names = names_of(model)
    first = dict(initial_values(model, names, seed=0, device=CPU))
    torch.manual_seed(99)
    some = dict(initial_values(model, names[::-3], seed=0, device=CPU))
    other = dict(initial_values(model, names, seed=1, device=CPU))
    assert all(torch.equal(first[n], some[n]) for n in some)
    assert not torch.equal(first[names[0]], other[names[0]])


def test_a_parent_has_the_last_word_on_its_child() -> None:
    """GPT-2 scales down what its residual projections start with."""
    model = on_meta("gpt2")
    found = dict(initial_values(model, names_of(model), seed=0, device=CPU))
    plain = found["transformer.h.0.attn.c_attn.weight"].std()
    scaled = found["transformer.h.0.attn.c_proj.weight"].std()
    assert float(scaled / plain) == pytest.approx(0.5, rel=0.15)  # 1 / sqrt(2 * 2 layers)


def test_the_random_state_of_the_process_is_left_alone() -> None:
    before = torch.get_rng_state()
    model = on_meta("llama")
    dict(initial_values(model, names_of(model), seed=0, device=CPU))
    assert torch.equal(before, torch.get_rng_state())


def test_tensors_with_values_keep_them() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    weight = model[0].weight.detach().clone()
    found = dict(initial_values(model, names_of(model), seed=0, device=CPU))
    assert torch.equal(found["0.weight"], weight) and torch.equal(model[0].weight, weight)
    assert not found["1.weight"].is_meta


def test_no_more_than_one_module_is_whole_at_a_time() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4, device="meta") for _ in range(5)))
    alive: list[weakref.ref[Tensor]] = []
    most = 0
    for _, value in initial_values(model, names_of(model), seed=0, device=CPU):
        alive.append(weakref.ref(value.untyped_storage()))
        del value
        most = max(most, sum(ref() is not None for ref in alive))
    assert most <= 2, "weight and bias of one linear"


class WritesThroughData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3))
        self.shift = nn.Parameter(torch.empty(3))

    def _init_weights(self, module: nn.Module) -> None:
        if module is self:
            self.scale.data.fill_(2.0)
            nn.init.trunc_normal_(self.shift)


def test_writes_that_hide_from_version_counters_are_seen() -> None:
    with torch.device("meta"):
        model = WritesThroughData()
    found = dict(initial_values(model, names_of(model), seed=0, device=CPU))
    assert found["scale"].tolist() == [2.0, 2.0, 2.0]
    assert not found["shift"].isnan().any()


class Uninitialised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(3))
        self.register_buffer("positions", torch.arange(3))


def test_what_no_call_initialises_is_refused_by_name() -> None:
    with torch.device("meta"):
        model = Uninitialised()
    for name in ("table", "positions"):
        with pytest.raises(MeshfoldError, match=f"{name} is on the meta device and neither reset_"):
            dict(initial_values(model, [name], seed=0, device=CPU))


class OnlyLooks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(3))

    def reset_parameters(self) -> None:
        assert self.table.data.shape == (3,)


def test_a_call_that_looks_and_does_not_write_is_refused_too() -> None:
    with torch.device("meta"):
        model = OnlyLooks()
    with pytest.raises(MeshfoldError, match="table is on the meta device"):
        dict(initial_values(model, ["table"], seed=0, device=CPU))
