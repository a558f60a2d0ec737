"""The batch of a step: keyword arguments in, the local tensors that the program reads out.

Every rank may pass the global batch, of which the program takes its part, or only its own part
along the data-parallel axis; the shapes tell which.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshfold.capture.dedup.contents import content_of
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.distributed.rank_mesh import RankMesh
from meshfold.errors import OptionError
from meshfold.ir.mesh import DATA_AXIS
from meshfold.ir.op_graph import InputInfo, SourceKind
from meshfold.ir.spmd import INVARIANT, Layout, Shard, local_shape
from meshfold.sharding.layout import shard_of
from meshfold.torch_compat.dtypes import dtype_name, torch_dtype
from meshfold.torch_compat.pytree import map_named, named_leaves

Shapes = Mapping[str, tuple[int, ...]]
"""Of the tensors of a batch, by input name."""

_FIRST_DIM = Shard(0)
_NOTHING = object()


class BatchReader:
    """Checks batches against the inputs of a program, or of the programs of all stages. fixed: what
    the program was captured with of arguments that are no tensors, and the values of fixed inputs.
    casts: floats of any width are cast to what it takes."""

    def __init__(
        self,
        programs: Sequence[EmittedProgram],
        mesh: RankMesh,
        fixed: Mapping[str, Any],
        *,
        casts: bool = False,
    ) -> None:
        self.mesh = mesh
        self.casts = casts
        self.fixed = fixed
        self._contents = {
            name: content_of(x) for name, x in fixed.items() if not isinstance(x, Tensor)
        }
        self.infos = {info.name: info for info in programs[0].folded.inputs}
        names = mesh.mesh.names
        self.axis = names.index(DATA_AXIS) if DATA_AXIS in names else -1
        self.local_inputs: set[str] = set()
        """Inputs of which the last batch of the program's own size had this rank's part."""
        self.is_smaller = False
        """Whether the batch that is read has rows as this rank's part, and is a global one."""
        self.sharded = {name for name, layouts in _layouts(programs) if self._is_split(layouts)}

    def read(self, batch: Mapping[str, Any]) -> "LocalBatch":
        """The tensors of `batch`. Raises OptionError for one that does not fit the program."""
        self.refuse_arguments(batch)
        tensors = self._tensors(batch)
        for name, value in tensors.items():
            if name in self.infos and self.infos[name].is_differentiated:
                tensors[name] = value.detach()  # forward takes that gradient, and nobody adds to it
            _refuse_tensor(name, tensors[name])
        local = {name: self._is_local(name, value) for name, value in tensors.items()}
        dtypes = {name: torch_dtype(info.dtype) for name, info in self.infos.items()}
        placed = {n: value.to(self.mesh.device, dtypes[n]) for n, value in tensors.items()}
        return LocalBatch(self.mesh, self.axis, placed, local)

    def has_arguments(self, batch: Mapping[str, Any]) -> bool:
        """Whether a batch has the arguments that the program was captured with, of any shapes."""
        return not self._other_argument(batch)

    def refuse_arguments(self, batch: Mapping[str, Any]) -> None:
        """Raises OptionError for a batch with other arguments."""
        if other := self._other_argument(batch):
            raise OptionError(
                f"{other}; call it so under torch.no_grad(), or compile again with these arguments "
                "in example_inputs"
            )

    def _other_argument(self, batch: Mapping[str, Any]) -> str:
        """What differs from the captured arguments, "" if nothing."""
        arguments = dict(named_leaves(dict(batch)))
        tensors = self._tensors(batch).keys()
        for name, value in arguments.items():
            if name not in tensors and not self._is_as_captured(name, value):
                if isinstance(value, Tensor):
                    return f"{name} is a fixed input, and has other values than in the example"
                return f"argument {name}={_shown(value)} was not captured with this value"
        if missing := [name for name in self._fixed_tensors if name not in arguments]:
            return f"the batch has no {missing[0]}, which is a fixed input of the program"
        if tensors != self.infos.keys():
            return (
                f"the batch has tensors {', '.join(sorted(tensors)) or 'none'}; the program was "
                f"captured with {', '.join(sorted(self.infos))}"
            )
        return ""

    def _tensors(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors of a batch by path, without those of fixed inputs."""
        leaves = named_leaves(dict(batch))
        fixed = self._fixed_tensors
        return {k: v for k, v in leaves if isinstance(v, Tensor) and k not in fixed}

    @property
    def _fixed_tensors(self) -> dict[str, Tensor]:
        return {name: x for name, x in self.fixed.items() if isinstance(x, Tensor)}

    def _is_as_captured(self, name: str, value: Any) -> bool:
        """Whether an argument has the value, or is this rank's rows of it, that it is captured
        with."""
        known = self.fixed.get(name, _NOTHING)
        if not isinstance(known, Tensor) or not isinstance(value, Tensor):
            is_tensor = isinstance(known, Tensor) or isinstance(value, Tensor)
            return not is_tensor and self._contents.get(name, _NOTHING) == content_of(value)
        rows, ranks = len(known) if known.dim() else 0, 1
        if self.axis >= 0:
            ranks = self.mesh.mesh.sizes[self.axis]
        if value.shape != known.shape and rows == ranks * len(value) and ranks > 1:
            known = known.chunk(ranks)[self.mesh.coords[self.axis]]
        return value.shape == known.shape and bool((value.cpu() == known).all())

    def global_shapes(self, batch: Mapping[str, Any]) -> Shapes:
        """Global shapes of a batch of other arguments. A tensor that the program knows is this
        rank's slice if it has that shape, or was one in the last batch of the program's own size;
        one that it does not know is as the others are."""
        tensors = self._tensors(batch)
        shapes = {name: tuple(value.shape) for name, value in tensors.items()}
        known = [n for n in shapes if n in self.infos and shapes[n]]
        sliced = {n for n in known if self._is_slice(n, shapes[n])}
        rows = {shapes[n][0] for n in sliced}
        sliced |= {n for n, s in shapes.items() if n not in known and s and s[0] in rows}
        ranks = self.mesh.mesh.sizes[self.axis] if sliced else 1
        return {n: (s[0] * ranks, *s[1:]) if n in sliced else s for n, s in shapes.items()}

    def _is_slice(self, name: str, shape: tuple[int, ...]) -> bool:
        if shape in (self.infos[name].shape, self._part(name)):
            return shape != self.infos[name].shape and not self.is_smaller
        return name in self.local_inputs

    def may_be_smaller(self, batch: Mapping[str, Any]) -> bool:
        """Whether a batch has the shapes of slices and may be a smaller global one, of which all
        ranks have the same rows: the last batch of the program's own size was no slice."""
        tensors = self._tensors(batch).items()
        shapes = {n: tuple(x.shape) for n, x in tensors if n in self.sharded}
        parts = (shape == self._part(n) != self.infos[n].shape for n, shape in shapes.items())
        return bool(shapes) and not self.local_inputs and all(parts)

    def other_shapes(self, batch: Mapping[str, Any]) -> Shapes | None:
        """Global shapes of a batch of another size than the program takes; None for one that it
        takes, or that `read` refuses. A tensor is this rank's slice if it was in the last batch of
        the program's own size, else of the global batch, as all are where `is_smaller`."""
        tensors = self._tensors(batch)
        if any(n not in self.infos or v.dim() != self._rank(n) for n, v in tensors.items()):
            return None
        shapes = {name: tuple(value.shape) for name, value in tensors.items()}
        if self.is_smaller:
            return shapes
        if all(shape in (self.infos[n].shape, self._part(n)) for n, shape in shapes.items()):
            self.local_inputs = {n for n, shape in shapes.items() if shape != self.infos[n].shape}
            return None
        ranks = self.mesh.mesh.sizes[self.axis] if self.local_inputs else 1
        return {
            n: (shape[0] * ranks, *shape[1:]) if n in self.local_inputs else shape
            for n, shape in shapes.items()
        }

    def _rank(self, name: str) -> int:
        return len(self.infos[name].shape)

    def _part(self, name: str) -> tuple[int, ...] | None:
        """Shape of this rank's slice of an input, if it has one."""
        if name not in self.sharded:
            return None
        sizes = (self.mesh.mesh.sizes[self.axis],)
        return local_shape(self.infos[name].shape, (_FIRST_DIM,), sizes)

    def _is_split(self, layouts: Sequence[Layout]) -> bool:
        return self.axis >= 0 and any(x[self.axis] == _FIRST_DIM for x in layouts)

    def _is_local(self, name: str, value: Tensor) -> bool:
        info: InputInfo = self.infos[name]
        is_cast = self.casts and value.is_floating_point() and "float" in info.dtype
        if dtype_name(value.dtype) != info.dtype and not is_cast:
            raise OptionError(
                f"{name} has dtype {dtype_name(value.dtype)}; the program was captured with "
                f"{info.dtype}"
            )
        shape = tuple(value.shape)
        if shape == info.shape:
            return False
        shapes = f"{list(info.shape)}"
        mine = self._part(name)
        if mine is not None:
            if shape == mine:
                return True
            shapes += f" for the global batch or {list(mine)} for one rank's slice"
        raise OptionError(f"{name} has shape {list(shape)}; the program takes {shapes}")


class LocalBatch:
    """The tensors of one batch, by input name; `is_local` says which are this rank's slice."""

    def __init__(
        self, mesh: RankMesh, axis: int, tensors: Mapping[str, Tensor], is_local: Mapping[str, bool]
    ) -> None:
        self._mesh = mesh
        self._axis = axis
        self._tensors = dict(tensors)
        self._is_local = dict(is_local)

    def gathered_where_needed(self, layouts: Mapping[str, Layout]) -> "LocalBatch":
        """This batch, gathered on every rank unless all inputs or none are this rank's slice.

        Microbatches of a rank's slice have other samples than those of the global batch: all inputs
        are split the one way or the other. One that is not split into microbatches is global.
        """
        if any(self._is_local.values()) and not all(
            layout[0].is_shard and self._is_local[name] for name, layout in layouts.items()
        ):
            unsharded = (INVARIANT,) * len(self._mesh.mesh.axes)
            for name in sorted(layouts):
                self(name, unsharded)
        return self

    def slices_own_batch(self, layouts: Mapping[str, Layout]) -> bool:
        """Whether microbatches are slices of this rank's slice of the batch: see
        gathered_where_needed."""
        return any(self._is_local[name] for name in layouts)

    def microbatch(self, layouts: Mapping[str, Layout], count: int, number: int) -> "LocalBatch":
        """Microbatch `number` of `count`. layouts: of each input over the microbatches."""
        tensors = {
            name: shard_of(x, layouts[name], (count,), (number,)) if name in layouts else x
            for name, x in self._tensors.items()
        }
        return LocalBatch(self._mesh, self._axis, tensors, self._is_local)

    def __call__(self, name: str, layout: Layout) -> Tensor:
        """The local tensor of an input in `layout`."""
        sizes, coords = self._mesh.mesh.sizes, self._mesh.coords
        x = self._tensors[name]
        if not self._is_local[name]:
            return shard_of(x, layout, sizes, coords)
        if layout[self._axis] == _FIRST_DIM:
            return shard_of(x, layout, sizes, coords, done=self._axis)
        # The global tensor is read: gather the slices, once.
        local_inputs = self._mesh.start_all_gather(x.contiguous(), (DATA_AXIS,))
        self._tensors[name] = self._mesh.wait(local_inputs)
        self._is_local[name] = False
        return shard_of(self._tensors[name], layout, sizes, coords)


def _shown(value: Any) -> str:
    """Short, on one line."""
    text = repr(value)
    return text if len(text) < 60 and "\n" not in text else f"of type {type(value).__name__}"


def constants_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What of some arguments is no tensor, by path."""
    leaves = named_leaves(dict(arguments))
    return {name: leaf for name, leaf in leaves if not isinstance(leaf, Tensor)}


def with_shapes(batch: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
    """The batch with tensors of these shapes in place of its own, without storage; tensors that
    have no new shape, those of fixed inputs, stay."""

    def new(path: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or path not in shapes:
            return value
        return torch.empty(shapes[path], dtype=value.dtype, device="meta")

    resized: dict[str, Any] = map_named(new, dict(batch))
    return resized


def _layouts(programs: Sequence[EmittedProgram]) -> Iterator[tuple[str, list[Layout]]]:
    """Per input the layouts in which regions read it."""
    layouts: dict[str, list[Layout]] = {}
    for program in programs:
        for k, instance in enumerate(program.folded.instances):
            for source, layout in zip(instance.sources, program.region_of(k).slots, strict=True):
                if source.kind is SourceKind.INPUT:
                    layouts.setdefault(source.name, []).append(layout)
    yield from layouts.items()


def _refuse_tensor(name: str, value: Tensor) -> None:
    """Raises OptionError for a tensor that no step reads as the model would."""
    if value.is_meta:
        raise OptionError(f"{name} is on the meta device and has no values; pass a real batch")
    if not torch.is_grad_enabled():
        return
    if value.is_inference():
        raise OptionError(
            f"{name} was made under torch.inference_mode(), and no backward reads such a tensor; "
            f"pass {name}.clone()"
        )
    if value.requires_grad:
        # A rank has the part of this gradient that its shards make, and nothing adds the parts up.
        raise OptionError(
            f"{name} requires a gradient, and a program computes those of parameters alone; pass "
            f"{name}.detach()"
        )
