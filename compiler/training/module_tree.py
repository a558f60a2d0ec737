"""The module tree of a compiled model: that of the original, with shards in place of tensors."""

from collections.abc import Mapping

from torch import Tensor, nn

from meshfold.errors import MeshfoldError
from meshfold.training.foreign_wrappers import OwnParallelism


def register_shards(
    root: nn.Module,
    model: nn.Module,
    canonical: Mapping[str, str],
    parameters: Mapping[str, nn.Parameter],
    buffers: Mapping[str, Tensor],
    persistent: Mapping[str, bool],
) -> None:
    """Registers local tensors in `root` under the names of `model`, in its order. canonical: the
    name of each tensor's first occurrence, by which the others are given."""
    for name, _ in model.named_parameters(remove_duplicate=False):
        if canonical[name] in parameters:
            owner, leaf = _owner(root, name)
            owner.register_parameter(leaf, parameters[canonical[name]])
    for name, _ in model.named_buffers(remove_duplicate=False):
        if canonical[name] in buffers:
            owner, leaf = _owner(root, name)
            buffer = buffers[canonical[name]]
            owner.register_buffer(leaf, buffer, persistent=persistent[canonical[name]])


def _owner(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds the tensor called `name`, made if needed, and its name in there."""
    *path, leaf = name.split(".")
    module = root
    for part in path:
        if part not in module._modules:
            if hasattr(module, part):
                raise MeshfoldError(
                    f"the model calls a submodule {part!r}, which is an attribute of "
                    "CompiledModel; rename it in the model"
                )
            module.add_module(part, OwnParallelism())
        module = module._modules[part]  # type: ignore[assignment]
    return module, leaf
