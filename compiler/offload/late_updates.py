"""The host's step beside the next step of the device, on gradients that are one step old.

    step t     forward and backward read R, a copy of the parameters P
    then       wait for update t - 1 of P, copy P to R, hand the gradients of t to update t
    step t+1   runs beside update t, and reads P without it

(Nie et al. 2023, arXiv:2303.02868, update so without a lock.) Here it is always one update that a
step does not see, whoever is faster, so that a run can be repeated; it trains other numbers than
the plan without it.
"""

from collections import defaultdict
from collections.abc import Mapping
from threading import Thread

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshfold.errors import OptionError
from meshfold.offload.host_parameters import HostParameters


class LateUpdates:
    """In place of `optimizer` in a training loop: `step` and `zero_grad`; before parameters or
    states are looked at, `finish`. Learning rates are those of `optimizer`, as they are when `step`
    is called.

    model: a CompiledModel whose plan has parameters on the host; optimizer: of its parameters.
    Parameters on the host take their size of its memory once more. Raises OptionError where there
    is nothing on the host, or where the optimizer's `step` is not torch's own."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        host = getattr(model, "host_side", None)
        if not isinstance(host, HostParameters):
            raise OptionError(
                "LateUpdates: the plan has no parameters on the host, and no step of its own there;"
                " pin offload=optimizer, or leave it out"
            )
        if getattr(optimizer.step, "__func__", type(optimizer).step) is not type(optimizer).step:
            raise OptionError(
                f"LateUpdates: {type(optimizer).__name__}.step was replaced, as schedulers and "
                "keep_states_on_disk do; make LateUpdates first, or leave keep_states_on_disk out"
            )
        self.optimizer = optimizer
        everything = [p for group in optimizer.param_groups for p in group["params"]]
        self._leaves = {p: p.detach() for p in everything if host.has_stored(p)}
        """What updates work on: the memory of a parameter, with gradients of its own."""
        self._read = {p: p.detach().clone() for p in self._leaves}
        host.read_instead(self._read)
        self._running: Thread | None = None
        self._late: Optimizer | None = None
        self._failure: BaseException | None = None
        model.register_state_dict_pre_hook(lambda *_: self.finish())  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """Hand the gradients over, which are gone from the parameters afterwards. Parameters on the
        device are updated at once. Raises what the update before has raised."""
        self.finish()
        here = [p for g in self.optimizer.param_groups for p in g["params"]]
        at_once = {p: p for p in here if p not in self._leaves}
        if at_once:
            update = self._shadow(at_once)
            update.step()
            self._take_states(update, at_once)
        self._late = self._shadow(self._leaves)
        for parameter, leaf in self._leaves.items():
            leaf.grad, parameter.grad = parameter.grad, None
        self._running = Thread(target=self._update, args=(self._late,))
        self._running.start()

    def zero_grad(self) -> None:
        """Forget gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def finish(self) -> None:
        """Wait for the update that runs; forwards read it from here on. Raises what it raised."""
        if self._running is None:
            return
        self._running.join()
        self._running = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        assert self._late is not None, "there was a step"
        self._take_states(self._late, self._leaves)
        with torch.no_grad():
            for parameter, read in self._read.items():
                read.copy_(parameter)

    def _update(self, update: Optimizer) -> None:
        try:
            update.step()
        except BaseException as error:
            self._failure = error

    def _shadow(self, leaves: Mapping[Tensor, Tensor]) -> Optimizer:
        """The optimizer as it is now for some of its parameters, by what it is to work on."""
        found: Optimizer = object.__new__(type(self.optimizer))
        found.__dict__.update(self.optimizer.__dict__)
        found.__dict__.pop("step", None)  # a scheduler's, which counts steps of the original
        found.state, found.param_groups = defaultdict(dict), []
        for group in self.optimizer.param_groups:
            own = [p for p in group["params"] if p in leaves]
            if own:
                found.param_groups.append({**group, "params": [leaves[p] for p in own]})
                found.state.update((leaves[p], self.optimizer.state[p]) for p in own)
        return found

    def _take_states(self, update: Optimizer, leaves: Mapping[Tensor, Tensor]) -> None:
        for parameter, leaf in leaves.items():
            self.optimizer.state[parameter] = update.state[leaf]
