"""One small decoder that returns what it computes in many forms."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils import ModelOutput

VOCABULARY, WIDTH, HEADS, ROWS, LENGTH = 32, 16, 2, 4, 8


@dataclass
class Record:
    """An output class of a user's own."""

    loss: Tensor | None
    logits: Tensor
    hidden: tuple[Tensor, ...] = ()
    name: str = "record"


@dataclass
class Output(ModelOutput):
    """One of transformers'."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        heads = self.qkv(self.norm(x)).view(rows, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.down(F.gelu(self.up(x)))


class Decoder(nn.Module):
    """Like nanoGPT: without targets it gives the logits of the last token alone."""

    def __init__(self, form: str = "tuple", dropout: float = 0.0) -> None:
        super().__init__()
        self.form = form
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None, scale: float = 1.0) -> Any:
        x = self.drop(self.tokens(idx))
        hidden = [x]
        for block in self.blocks:
            x = block(x)
            hidden.append(x)
        x = self.norm(x)
        if targets is None:
            return self.returned(self.head(x[:, [-1], :]), None, hidden)
        logits = self.head(x) * scale
        loss = F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1), ignore_index=-1)
        return self.returned(logits, loss, hidden)

    def returned(self, logits: Tensor, loss: Tensor | None, hidden: list[Tensor]) -> Any:
        match self.form:
            case "tuple":
                return logits, loss
            case "loss first":
                return loss, logits
            case "dict":
                return {"loss": loss, "logits": logits, "states": {"last": hidden[-1]}}
            case "record":
                return Record(loss, logits, tuple(hidden))
            case "output":
                return Output(loss=loss, logits=logits, hidden_states=tuple(hidden))
            case "losses" if loss is not None:
                size = (0.1 * logits.square()).mean()
                return {"logits": logits, "losses": {"cls": loss, "size": size}}
        return logits


def decoder(form: str = "tuple", dropout: float = 0.0) -> tuple[Decoder, dict[str, Tensor]]:
    """A model in float64 and its batch, with targets of which unevenly many count."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = Decoder(form, dropout).double()
        idx = torch.randint(0, VOCABULARY, (ROWS, LENGTH))
        targets = torch.randint(0, VOCABULARY, (ROWS, LENGTH))
    targets[0, :3] = -1
    return model, {"idx": idx, "targets": targets}


def classifier() -> tuple[nn.Module, dict[str, Tensor], nn.Module]:
    """Logits alone, running statistics inside, and a criterion with a tensor of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)
        ).double()
        batch = {"input": torch.randn(8, 8).double(), "y": torch.randint(0, 4, (8,))}
    weight = torch.tensor([1.0, 2.0, 1.0, 0.5]).double()
    return model, batch, nn.CrossEntropyLoss(weight=weight)


def decoder_with_outputs() -> tuple[nn.Module, dict[str, Tensor]]:
    """MODEL of the command line."""
    return decoder("record")


def classifier_with_criterion() -> tuple[nn.Module, dict[str, Tensor], nn.Module]:
    """MODEL of the command line, with a loss function."""
    model, batch, loss_fn = classifier()
    return model[:1].append(nn.Linear(16, 4).double()), batch, loss_fn
