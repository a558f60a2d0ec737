"""What skeletons were made of, to see whether running the model changed it.

A model can register hooks, tensors and submodules in its first forward, as those of Hugging Face
register the hooks that collect hidden states. What was found for a child before is then not true of
the child any more.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from meshfold.torch_compat.global_hooks import global_hooks

_TABLES = tuple(n for n in vars(nn.Module()) if n.endswith("hooks") and "state_dict" not in n)


class Structure:
    """Hooks, names of tensors, submodules and modes of all modules of a model, at one time."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.facts, self.kept = _facts(model)

    def change(self) -> str:
        """What is another now, as the end of a sentence, "" if nothing."""
        now, _ = _facts(self.model)
        for path, facts in now.items():
            before = self.facts.get(path)
            if before is None:
                return f"adds a module, {path or 'the root'}"
            for kind, fact in facts.items():
                if fact != before[kind]:
                    return f"changes {kind} of {path or 'the model'}"
        if now.keys() != self.facts.keys():
            return f"removes a module, {min(self.facts.keys() - now.keys())}"
        return f"registers {', '.join(registered)}" if (registered := global_hooks()) else ""


class Hooks:
    """The hooks that the modules of a model had at one time, by torch's numbers for them."""

    def __init__(self, model: nn.Module) -> None:
        self.known = frozenset(n for module in model.modules() for n in _numbers(module))

    def registered(self, root: nn.Module) -> str:
        """What has been registered since that runs inside of `root`, "" if nothing."""
        for path, module in root.named_modules():
            if not self.known.issuperset(_numbers(module)):
                return f"hooks of {path or type(root).__name__}"
        return ", ".join(global_hooks())


def _numbers(module: nn.Module) -> Iterator[int]:
    own = object.__getattribute__(module, "__dict__")
    for name in _TABLES:
        if own[name]:
            yield from own[name]


def _facts(model: nn.Module) -> tuple[dict[str, dict[str, object]], list[Any]]:
    """By module, and the objects whose ids are in it: alive, they keep them."""
    found: dict[str, dict[str, object]] = {}
    kept: list[Any] = []
    for path, module in model.named_modules():
        own = object.__getattribute__(module, "__dict__")
        hooks = [f for name in _TABLES for f in own[name].values()]
        parameters = own["_parameters"]
        kept += [module, *hooks, *parameters.values()]
        found[path] = {
            "hooks": tuple(map(id, hooks)),
            "parameters": tuple(
                (name, id(p), p is not None and p.requires_grad) for name, p in parameters.items()
            ),
            "buffers": tuple(own["_buffers"]),
            "submodules": tuple((name, id(m)) for name, m in own["_modules"].items()),
            "the mode": own["training"],
        }
    return found, kept
