"""Modules that refuse what would distribute them once more (DDP, FSDP, accelerate), pickle, and
what relies on modules that a compiled program does not call."""

from typing import Any, NoReturn, Self

from torch import nn

from meshfold.errors import OptionError


class OwnParallelism(nn.Module):
    """A module whose parameters are shards already. Raises OptionError, when
    DistributedDataParallel (as accelerate.prepare uses it), FullyShardedDataParallel or fully_shard
    are put around it.

    elsewhere: names of tensors of the model that this rank does not hold."""

    elsewhere: frozenset[str] = frozenset()

    def __getattr__(self, name: str) -> Any:
        if name in self.elsewhere:
            raise AttributeError(
                f"{name} is a tensor of the model that this rank does not hold: another stage of "
                "the plan does, or no step reads it; model.full_state_dict() has all of them"
            )
        return super().__getattr__(name)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        """What DistributedDataParallel asks for before it broadcasts parameters."""
        _refuse("DistributedDataParallel")

    def __setattr__(self, name: str, value: Any) -> None:
        # The mark that both kinds of FSDP set on the modules that they manage.
        if name == "_is_fsdp_managed_module":
            _refuse("FSDP")
        super().__setattr__(name, value)

    def apply(self, fn: Any) -> NoReturn:
        """Raises OptionError: parts have lost the classes that `fn` would look for."""
        raise OptionError(
            "apply on a compiled model: its parts hold parameters and are no Linear or Dropout any "
            "more; apply it to the model before meshfold.compile"
        )


class PartOfModel(OwnParallelism):
    """What holds the parameters of a module inside a compiled model. Raises OptionError where it is
    called, given hooks that would never run, settings that no program reads or another mode.

    mode: train (True) or eval, in which the module was when it was captured; None where it does the
    same in both."""

    mode: bool | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        is_setting = value is None or isinstance(value, bool | int | float | str)
        if is_setting and name not in vars(self) and not name.startswith("_"):
            if name not in self._parameters and name not in self._buffers:
                raise OptionError(
                    f"{name} of a part of a compiled model would be read by nothing, since the "
                    "program holds it as a constant; set it before meshfold.compile"
                )
        super().__setattr__(name, value)

    def train(self, mode: bool = True) -> Self:
        """Raises OptionError where the module would do something else than was captured."""
        for part in self.modules():
            if isinstance(part, PartOfModel) and part.mode not in (None, mode):
                raise OptionError(
                    "a part of a compiled model has no mode of its own: the program runs it in "
                    f"{'train' if part.mode else 'eval'} mode with the whole model; set its mode "
                    "before meshfold.compile, which captures it"
                )
        return super().train(mode)

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise OptionError(
            "a part of a compiled model is called: it holds parameters, and the program runs the "
            "whole model; call the compiled model (outputs= of meshfold.compile returns more of it)"
        )

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises OptionError."""
        _refuse_hook()

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises OptionError."""
        _refuse_hook()

    def register_full_backward_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises OptionError."""
        _refuse_hook()

    def register_full_backward_pre_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises OptionError."""
        _refuse_hook()


class RankModel(OwnParallelism):
    """A model of one rank among processes. Raises OptionError where it is pickled."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise OptionError(
            "a compiled model is not pickled: it is one rank's shards, and groups of processes; "
            "save it with meshfold.save_checkpoint or its state_dict, copy it with copy.deepcopy"
        )


def _refuse_hook() -> NoReturn:
    raise OptionError(
        "a hook of a part of a compiled model would never run, since the program calls no parts; "
        "register it before meshfold.compile, which captures what it computes, or on the compiled "
        "model, or on a parameter"
    )


def _refuse(wrapper: str) -> NoReturn:
    raise OptionError(
        f"{wrapper} around a compiled model: its parameters are this rank's shards, and its plan "
        "reduces their gradients; use it as meshfold.compile returned it (with accelerate, prepare "
        "the optimizer and the data, not the model)"
    )
