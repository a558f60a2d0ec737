"""Models of torch_geometric and peft."""

import importlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from zoo.entry import Built, Entry

NODES, EDGES = 8, 20


class _NodeClasses(nn.Module):
    """Node classification on one graph."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, edge_index: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self.net(x, edge_index), y)


def _geometric(name: str, **fields: Any) -> Entry:
    """A basic model of two layers over a list of edges."""

    def build() -> Built:
        nets = importlib.import_module("torch_geometric.nn")
        net = getattr(nets, name)(16, 16, 2, 4, **fields)
        return _NodeClasses(net).train(), _graph()

    return Entry("torch_geometric", name.lower(), build)


def _graph() -> dict[str, Tensor]:
    return {
        "x": torch.randn(NODES, 16),
        "edge_index": torch.randint(0, NODES, (2, EDGES)),
        "y": torch.randint(0, 4, (NODES,)),
    }


class _Layers(nn.Module):
    """Two convolutions of a kind."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(functional.relu(self.first(x, edge_index)), edge_index)


def _convolutions(name: str, *arguments: Any, **fields: Any) -> Entry:
    def build() -> Built:
        kind = getattr(importlib.import_module("torch_geometric.nn"), name)
        net = _Layers(kind(16, 16, *arguments, **fields), kind(16, 4, *arguments, **fields))
        return _NodeClasses(net).train(), _graph()

    return Entry("torch_geometric", name, build)


class _Dense(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        kind = getattr(importlib.import_module("torch_geometric.nn"), name)
        self.first, self.second, self.head = kind(16, 16), kind(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, adj: Tensor, target: Tensor) -> Tensor:
        y = self.second(self.first(x, adj).relu(), adj)
        return functional.mse_loss(self.head(y.mean(1)), target)


def _dense(name: str) -> Entry:
    def build() -> Built:
        batch = {
            "x": torch.randn(4, 6, 16),
            "adj": (torch.rand(4, 6, 6) < 0.5).float(),
            "target": torch.randn(4, 4),
        }
        return _Dense(name).train(), batch

    return Entry("torch_geometric", name, build)


GEOMETRIC = (
    _geometric("GCN"),
    _geometric("GraphSAGE"),
    _geometric("GIN"),
    _geometric("GAT", heads=2),
    _geometric("EdgeCNN"),
    _convolutions("TransformerConv"),
    _convolutions("ChebConv", 2),
    _convolutions("GraphConv"),
    _convolutions("TAGConv"),
    _convolutions("ARMAConv"),
    _dense("DenseGCNConv"),
    _dense("DenseSAGEConv"),
    _dense("DenseGraphConv"),
)


def _llama() -> nn.Module:
    transformers = importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def _peft(name: str, kind: str, **fields: Any) -> Entry:
    def build() -> Built:
        peft = importlib.import_module("peft")
        config = getattr(peft, kind)(task_type="CAUSAL_LM", **fields)
        model = peft.get_peft_model(_llama(), config)
        ids = torch.randint(0, 64, (4, 8))
        labels = ids.clone()
        labels[0, :4] = -100
        return model.train(), {"input_ids": ids, "labels": labels}

    return Entry("peft", name, build)


_QV = {"target_modules": ["q_proj", "v_proj"]}
PEFT = (
    _peft("lora", "LoraConfig", r=4, **_QV),
    _peft("lora_all", "LoraConfig", r=4, target_modules="all-linear", lora_dropout=0.1),
    _peft("rs_lora", "LoraConfig", r=4, use_rslora=True, **_QV),
    _peft("dora", "LoraConfig", r=4, use_dora=True, **_QV),
    _peft(
        "ia3",
        "IA3Config",
        target_modules=["k_proj", "v_proj", "down_proj"],
        feedforward_modules=["down_proj"],
    ),
    _peft("vera", "VeraConfig", r=4, **_QV),
    _peft("loha", "LoHaConfig", r=4, **_QV),
    _peft("lokr", "LoKrConfig", r=4, **_QV),
    _peft("oft", "OFTConfig", oft_block_size=4, **_QV),
    _peft("ada_lora", "AdaLoraConfig", init_r=4, target_r=2, total_step=10, **_QV),
    _peft("prompt_tuning", "PromptTuningConfig", num_virtual_tokens=4),
    _peft("prefix_tuning", "PrefixTuningConfig", num_virtual_tokens=4),
    _peft("fourier_ft", "FourierFTConfig", n_frequency=8, **_QV),
)
MODELS = (*GEOMETRIC, *PEFT)
