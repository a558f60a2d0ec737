"""Fixed inputs: integer tensors of a batch that have the same values in every step.

    image_grid_thw [[1, 4, 4], [1, 4, 4]]     its numbers decide shapes: they are constants of the
                                              program, as arguments that are no tensors are

They are those that CompileOptions.fixed_inputs names, ALWAYS_FIXED, and the structure of a graph
where a model cannot be captured otherwise (`graph_structure`). The program takes them as
before, and refuses a batch in which they have other values (meshfold.runtime.batches).
"""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from meshfold.errors import OptionError
from meshfold.ir.plan import Plan
from meshfold.torch_compat.dtypes import dtype_name
from meshfold.torch_compat.pytree import named_leaves

ALWAYS_FIXED = (
    "image_grid_thw",
    "video_grid_thw",
    "image_sizes",
    "spatial_shapes",
    "mm_token_type_ids",
)
"""Arguments of models of transformers that say how large images are, and where they lie in the
text; the models read them as numbers."""

_EDGES = ("edge_index", "hyperedge_index", "edge_index_dict")
_OF_GRAPHS = (*_EDGES, "edge_type", "edge_type_dict", "batch")
"""Arguments of models of torch_geometric that say what a graph is: its edges, of which kind they
are, and to which graph of a batch a node belongs."""

_NOTE = "fixed input: "

_MOST_SHOWN = 12
"""Numbers of a fixed input that a note shows."""


def fixed_inputs(example_inputs: Mapping[str, Any], named: Collection[str]) -> dict[str, Tensor]:
    """The fixed inputs of a batch, by path. named: besides ALWAYS_FIXED.

    Raises OptionError for a name that the batch does not have, and for floats.
    """
    tensors = {n: x for n, x in named_leaves(dict(example_inputs)) if isinstance(x, Tensor)}
    for name in named:
        if name not in tensors:
            raise OptionError(
                f"fixed_inputs: {name!r} is no tensor of the batch, which has "
                f"{', '.join(tensors) or 'none'}; name one of them"
            )
        if tensors[name].is_floating_point() or tensors[name].is_complex():
            raise OptionError(
                f"fixed_inputs: {name!r} is of {dtype_name(tensors[name].dtype)}; whole numbers "
                "and flags can be the same in every batch, what a batch is made of is not"
            )
    always = [n for n in ALWAYS_FIXED if n in tensors and _has_whole_numbers(tensors[n])]
    found = {name: tensors[name] for name in dict.fromkeys((*always, *named))}
    for name, tensor in found.items():
        if tensor.is_meta:
            raise OptionError(
                f"fixed_inputs: {name!r} is on the meta device, where it has no values; make it on "
                "the CPU"
            )
    return {name: tensor.detach().cpu().clone() for name, tensor in found.items()}


def graph_structure(example_inputs: Mapping[str, Any], named: Collection[str]) -> tuple[str, ...]:
    """Inputs, besides `named`, that say what the one graph is that a model trains on: layers that
    leave out loops or count edges have shapes that depend on them."""
    tensors = {n: x for n, x in named_leaves(dict(example_inputs)) if isinstance(x, Tensor)}
    first = {name: name.split(".")[0] for name in tensors}
    if not any(argument in _EDGES for argument in first.values()):
        return ()
    return tuple(
        name
        for name, x in tensors.items()
        if first[name] in _OF_GRAPHS and name not in named and _has_whole_numbers(x)
    )


def _has_whole_numbers(x: Tensor) -> bool:
    return not x.is_meta and not x.is_floating_point()


def fixed_by(plan: Plan, example_inputs: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the inputs that are fixed in a plan: its notes say so, and it does not read them."""
    read = {info.name for info in plan.model.inputs}
    names = [n for n, x in named_leaves(dict(example_inputs)) if isinstance(x, Tensor)]
    noted = [note for note in plan.notes if note.startswith(_NOTE)]
    return tuple(
        n for n in names if n not in read and any(x.startswith(f"{_NOTE}{n} ") for x in noted)
    )


def fixed_note(name: str, value: Tensor) -> str:
    """The assumption, for the notes of a plan."""
    shown = str(value.tolist()).replace("\n", "")
    if value.numel() > _MOST_SHOWN:
        shown = f"{value.numel()} numbers of the example"
    return f"{_NOTE}{name} is {shown} in every batch; a batch with other values is refused"
