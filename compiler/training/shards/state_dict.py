"""State of a CompiledModel: local shards in, DTensors or full tensors out, and back.

With several ranks a state_dict holds DTensors on the plan's storage mesh, so that
torch.distributed.checkpoint saves every rank's part and loads it under another plan. A parameter
that is stored in interleaved blocks is re-sharded on the way (one gather of that parameter):
state_dict and load_state_dict are called on all ranks together.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshfold.distributed.rank_mesh import ProcessMesh, RankMesh
from meshfold.errors import OptionError
from meshfold.ir.mesh import PIPELINE_AXIS
from meshfold.ir.spmd import INVARIANT, Layout, local_shape
from meshfold.sharding.layout import Assembly, cropped, filled, shard_of, valid_shape
from meshfold.torch_compat.dtensor import as_dtensor, checkpoint_layout, drop_axes, is_placed
from meshfold.torch_compat.tensor_subclasses import plain_tensor


@dataclass(frozen=True)
class StoredTensor:
    """A parameter or buffer: global shape and the layout of its local part on the storage mesh."""

    shape: tuple[int, ...]
    layout: Layout


class StateExchange:
    """Converts between local parts and what a state_dict holds. `tensors`: by canonical name."""

    def __init__(self, mesh: RankMesh, tensors: Mapping[str, StoredTensor]) -> None:
        self.mesh = mesh
        self.tensors = tensors
        self.storage = mesh.mesh.storage
        self.coords = self.storage.coords(mesh.rank)
        # Nothing is sharded over stages: each tensor is its own stages' alone.
        self._sizes = tuple(1 if a.name == PIPELINE_AXIS else a.size for a in self.storage.axes)
        self.device_mesh = _device_mesh(mesh) if isinstance(mesh, ProcessMesh) else None

    def outside(self, name: str, local: Tensor) -> Tensor:
        """The state_dict entry of a local part: a DTensor, plain on one rank."""
        local = plain_tensor(local)
        if self.device_mesh is None:
            return local
        stored = self.tensors[name]
        sizes = self._sizes
        saved = checkpoint_layout(stored.layout, sizes)
        part = self._reshard(local, stored.shape, stored.layout, saved)
        # DTensor has no padding: the last ranks hold fewer rows, or none.
        part = cropped(part, valid_shape(stored.shape, saved, sizes, self.coords))
        mesh = self.device_mesh if part.device.type == self.mesh.device.type else self._host_mesh
        assert mesh is not None
        return as_dtensor(part, stored.shape, *drop_axes(saved, sizes), mesh)

    @cached_property
    def _host_mesh(self) -> DeviceMesh | None:
        """The same ranks, for what is stored in the memory of their hosts."""
        assert isinstance(self.mesh, ProcessMesh)
        return _device_mesh(self.mesh, "cpu")

    def as_dtensor(self, local: Tensor, shape: tuple[int, ...], layout: Layout) -> Tensor:
        """The tensor of which this rank has `local`, in a layout on the mesh, as a DTensor, plain
        on one rank. A gradient flows through it unless its blocks have to be put together first."""
        if self.device_mesh is None:
            return local
        layout = self.mesh.mesh.on_storage(layout)
        saved = checkpoint_layout(layout, self._sizes)
        part = self._reshard(local, shape, layout, saved)
        return as_dtensor(part, shape, *drop_axes(saved, self._sizes), self.device_mesh)

    def inside(self, name: str, value: Tensor) -> Tensor:
        """The local part of a DTensor or of a full plain tensor.

        Raises OptionError if the shape is not the parameter's.
        """
        stored = self.tensors[name]
        if tuple(value.shape) != stored.shape:
            raise OptionError(
                f"{name} has shape {list(stored.shape)}, the state given {list(value.shape)}; "
                "load full tensors or DTensors of this model"
            )
        sizes = self._sizes
        if isinstance(value, DTensor):
            saved = checkpoint_layout(stored.layout, sizes)
            mesh = self.device_mesh
            if mesh is not None and value.device.type != self.mesh.device.type:
                mesh = self._host_mesh
            if mesh is not None and is_placed(value, *drop_axes(saved, sizes), mesh):
                part = filled(value.to_local(), local_shape(stored.shape, saved, sizes))
                return self._reshard(part, stored.shape, saved, stored.layout)
            value = value.full_tensor()
        return shard_of(value, stored.layout, sizes, self.coords)

    def full(self, name: str, local: Tensor) -> Tensor:
        """The whole tensor, on every rank."""
        stored = self.tensors[name]
        whole = (INVARIANT,) * len(stored.layout)
        return self._reshard(local, stored.shape, stored.layout, whole)

    def _reshard(
        self, local: Tensor, shape: tuple[int, ...], source: Layout, target: Layout
    ) -> Tensor:
        local = plain_tensor(local)
        if source == target:
            return local
        names, sizes = self.storage.names, self.storage.sizes
        now = source
        # Collectives are of the device; what is stored on its host comes back.
        x = local.detach().to(self.mesh.device)
        for k, kind in enumerate(source):
            if not kind.is_shard:
                continue
            if sizes[k] > 1:
                flat = self.mesh.start_all_gather(x.reshape(-1), (names[k],))
                stacked = self.mesh.wait(flat).view(sizes[k], -1)
                x = Assembly(shape, now, sizes, (k,)).gathered(stacked)
            now = (*now[:k], INVARIANT, *now[k + 1 :])
        return shard_of(x, target, sizes, self.coords).contiguous().to(local.device)


def _device_mesh(mesh: ProcessMesh, device: str = "") -> DeviceMesh | None:
    """The axes of more than one rank as a DeviceMesh on the groups that exist already; of a
    pipeline those of this rank's stage. device: the type, if another than the mesh's."""
    of = mesh.mesh.storage
    axes = [a for a in of.axes if a.size > 1 and a.name != PIPELINE_AXIS]
    if not axes:
        return None
    groups: list[dist.ProcessGroup] = [mesh.group((a.name,)) for a in axes]
    ranks = torch.arange(of.num_ranks).view(of.sizes)
    if PIPELINE_AXIS in of.names:
        axis = of.index(PIPELINE_AXIS)
        ranks = ranks.select(axis, of.coords(mesh.rank)[axis])
    return DeviceMesh.from_group(
        groups if len(groups) > 1 else groups[0],
        device or mesh.device.type,
        mesh=ranks.reshape([a.size for a in axes]),
        mesh_dim_names=tuple(a.name for a in axes),
    )
