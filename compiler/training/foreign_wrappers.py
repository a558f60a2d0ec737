"""Modules that refuse what would distribute them once more (DDP, FSDP, accelerate), and pickle."""

from typing import Any, NoReturn

from torch import nn

from meshfold.errors import OptionError


class OwnParallelism(nn.Module):
    """A module whose parameters are shards already. Raises OptionError, when
    DistributedDataParallel (as accelerate.prepare uses it), FullyShardedDataParallel or fully_shard
    are put around it."""

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        """What DistributedDataParallel asks for before it broadcasts parameters."""
        _refuse("DistributedDataParallel")

    def __setattr__(self, name: str, value: Any) -> None:
        # The mark that both kinds of FSDP set on the modules that they manage.
        if name == "_is_fsdp_managed_module":
            _refuse("FSDP")
        super().__setattr__(name, value)


class RankModel(OwnParallelism):
    """A model of one rank among processes. Raises OptionError where it is pickled."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise OptionError(
            "a compiled model is not pickled: it is one rank's shards, and groups of processes; "
            "save it with meshfold.save_checkpoint or its state_dict, copy it with copy.deepcopy"
        )


def _refuse(wrapper: str) -> NoReturn:
    raise OptionError(
        f"{wrapper} around a compiled model: its parameters are this rank's shards, and its plan "
        "reduces their gradients; use it as meshfold.compile returned it (with accelerate, prepare "
        "the optimizer and the data, not the model)"
    )
