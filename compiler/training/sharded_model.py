"""A module whose parameters and buffers are one rank's shards: its state out, and back in."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from meshfold.codegen.emit.pipeline import EmittedPipeline
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.distributed.rank_mesh import RankMesh
from meshfold.errors import OptionError
from meshfold.training.foreign_wrappers import RankModel
from meshfold.training.module_tree import BoundTensors
from meshfold.training.shards.local_state import LocalTensors, full_tensors
from meshfold.training.shards.state_dict import StateExchange


class ShardedModel(RankModel):
    """The state of a compiled model. Whoever inherits sets the attributes below, which have no
    values without processes, but for program, rank_mesh and _canonical."""

    program: EmittedProgram | EmittedPipeline
    rank_mesh: RankMesh | None
    _canonical: dict[str, str]
    """The name of the captured tensor, of every name in the module tree."""
    _local_tensors: LocalTensors
    _states: StateExchange
    _bound: BoundTensors

    def full_state_dict(self) -> dict[str, Tensor]:
        """state_dict with full plain tensors, on every rank."""
        local = super().state_dict()
        if self.rank_mesh is not None:
            self._bound.check(self)
        if isinstance(self.program, EmittedPipeline) and self.rank_mesh is not None:
            shards = {self._canonical[name]: x for name, x in local.items()}
            full = full_tensors(self.program, self.rank_mesh, self._states, shards)
            return {n: full[c] for n, c in self._canonical.items() if c in full}
        return {n: self._states.full(self._canonical[n], value) for n, value in local.items()}

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As nn.Module.state_dict, with DTensors for local shards."""
        state = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        if self.rank_mesh is not None and not kwargs.get("keep_vars", False):
            for name, canonical in self._canonical.items():
                if prefix + name in state:
                    state[prefix + name] = self._states.outside(canonical, state[prefix + name])
        return state

    def global_shape(self, name: str) -> tuple[int, ...]:
        """Of the parameter `name`, all shards together."""
        return self._states.tensors[self._canonical[name]].shape

    def saved_form(self, name: str, local: Tensor) -> Tensor:
        """What state_dict would hold of a tensor that is cut like the parameter `name`."""
        return self._states.outside(self._canonical[name], local)

    def local_form(self, name: str, value: Tensor) -> Tensor:
        """Inverse of saved_form."""
        return self._states.inside(self._canonical[name], value)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As nn.Module.load_state_dict, from DTensors or full plain tensors.

        Raises OptionError for a tensor of another shape, and for `assign`.
        """
        if assign:
            raise OptionError("assign=True would replace local shards; load without it")
        names = {*self._local_tensors.parameters, *self._local_tensors.buffers}
        local = {
            name: self._states.inside(self._canonical[name], value)
            if name in self._canonical
            else value
            for name, value in state_dict.items()
            # Of other stages this rank holds nothing.
            if self._canonical.get(name, name) in names or name not in self._canonical
        }
        return super().load_state_dict(local, strict)
