"""An optimizer of torch whose states are kept in bfloat16 or in 8 bits between steps.

    step, chunk by chunk of every parameter (CHUNK_NUMBERS):
        states unpacked to the parameter's dtype -> torch's own step on the chunk -> packed again

Only optimizers that work number by number can step so. A chunk is a slice of the parameter's
memory, so that no step needs more than one chunk of unpacked states, however large the parameter.

On ranks that hold shards, blocks of 8 bits are those of the local shard: equal shardings train
bitwise alike, others within the error of a block (meshfold.low_precision.packing). bfloat16 depends
on nothing but the number and the count of steps: training is bitwise what it is in one process
wherever gradients are.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

import torch
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer

from meshfold.cost_models.op_costs.optimizers import BLOCK_NUMBERS, CHUNK_NUMBERS
from meshfold.errors import OptionError
from meshfold.ir.optimizers import StatesPrecision
from meshfold.low_precision.packing import Code, of_codes, to_bfloat16, to_codes
from meshfold.torch_compat.tensor_subclasses import on_plain_tensors, plain_tensor

LARGEST = ":largest"
"""What follows the name of an 8-bit state in that of the largest numbers of its blocks."""

CODES = ":codes"
"""What follows the name of an 8-bit state in a state_dict: another optimizer, which would take its
codes for numbers, finds no state of that name."""

UNSIGNED = ("exp_avg_sq", "max_exp_avg_sq")
"""States that are never negative."""


class LowPrecisionStates(Optimizer):
    """`optimizer` with its states in "bf16" or "int8": the optimizer of the training loop from here
    on. Its options are those of `optimizer`, learning rates included.

    optimizer: torch.optim.AdamW, Adam or SGD, over parameters of this rank. What it has so far is
    packed. Raises OptionError for another optimizer or precision."""

    def __init__(self, optimizer: Optimizer, precision: StatesPrecision) -> None:
        if precision not in get_args(StatesPrecision) or precision == "full":
            raise OptionError(f"states in {precision!r} are unknown; write bf16 or int8")
        if not isinstance(optimizer, (Adam, SGD)):
            raise OptionError(
                f"states of {type(optimizer).__name__} cannot be kept in {precision}: it looks at "
                "several numbers at once, or is unknown; write AdamW, Adam or SGD"
            )
        self.precision, self.inner = precision, optimizer
        self._codes: dict[tuple[bool, torch.device], Code] = {}
        super().__init__(optimizer.param_groups, optimizer.defaults)
        for parameter, state in optimizer.state.items():
            self.pack(parameter, state)
        optimizer.state.clear()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the optimizer on all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            # Chunks of a shard are as good as the shard: it all goes number by number.
            with on_plain_tensors():
                for group in self.param_groups:
                    for parameter in group["params"]:
                        if parameter.grad is not None:
                            self._step_on(parameter, group)
        finally:
            # A scheduler that was made for it goes on.
            self.inner.param_groups = self.param_groups
        return loss

    def unpacked(self, parameter: Tensor) -> dict[str, Any]:
        """The states of one parameter in its own dtype and shape."""
        state = self.state.get(parameter, {})
        whole = slice(0, parameter.numel())
        with on_plain_tensors():
            return {
                name: self._read(state, name, parameter, whole).view(parameter.shape)
                if self._is_packed(value, parameter)
                else value
                for name, value in state.items()
                if not name.endswith(LARGEST)
            }

    def pack(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        """Take these states of one parameter, unpacked ones packed, in place of what is there."""
        found: dict[str, Any] = {}
        for name, value in state.items():
            if self._is_unpacked(name, value, parameter):
                self._make(found, name, parameter)
                flat = plain_tensor(value).reshape(-1)
                for part in _parts(parameter.numel(), CHUNK_NUMBERS):
                    self._write(found, name, flat[part], part, state.get("step"))
            else:
                found[name] = value
        self.state[parameter] = found

    def state_dict(self) -> dict[str, Any]:
        """As of torch, with packed states; those of 8 bits have names that end in CODES."""
        found = super().state_dict()
        renamed = {
            number: {k + CODES * (k + LARGEST in values): x for k, x in values.items()}
            for number, values in found["state"].items()
        }
        return {**found, "state": renamed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of torch; states that were saved unpacked are packed. Raises OptionError for 8 bits
        where this one keeps 16, and for states of other shapes."""
        saved = {
            number: {k.removesuffix(CODES): x for k, x in values.items()}
            for number, values in state_dict["state"].items()
        }
        if self.precision != "int8" and any(LARGEST in k for x in saved.values() for k in x):
            raise OptionError(
                f"the states were saved in 8 bits, and are to be kept in {self.precision}; load "
                'them into LowPrecisionStates(optimizer, "int8"), or save a checkpoint of meshfold'
            )
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=False):
            _check_shapes(saved.get(number, {}), number, parameter)
        super().load_state_dict({**state_dict, "state": saved})
        self.inner.param_groups = self.param_groups
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            # torch casts states to the dtype of the parameter.
            kept = {
                name: value.to(parameter.device, copy=True)
                if LARGEST in name or self._is_packed(value, parameter)
                else self.state[parameter][name]
                for name, value in saved.get(number, {}).items()
            }
            if kept:
                self.pack(parameter, kept)

    def _step_on(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        """A step on one parameter, chunk by chunk."""
        packed, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        flat = parameter.is_contiguous() and gradient.is_contiguous()
        names = [name for name, value in packed.items() if self._is_packed(value, parameter)]
        others = {k: v for k, v in packed.items() if k not in names and LARGEST not in k}
        results: dict[str, Any] = {}
        for part in _parts(parameter.numel(), CHUNK_NUMBERS if flat else parameter.numel()):
            piece, piece.grad = parameter.detach(), gradient
            if flat:
                piece = parameter.detach().view(-1)[part]
                piece.grad = gradient.view(-1)[part]
            state = {k: v.clone() if isinstance(v, Tensor) else v for k, v in others.items()}
            for name in names:
                state[name] = self._read(packed, name, parameter, part).view(piece.shape)
            results = self._stepped(piece, state, group)
            for name in [k for k, v in results.items() if self._is_unpacked(k, v, piece)]:
                if name not in packed:
                    self._make(packed, name, parameter)
                value = results.pop(name).reshape(-1)
                self._write(packed, name, value, part, results.get("step"))
        packed.update(results)

    def _stepped(
        self, piece: Tensor, state: dict[str, Any], group: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The states of a piece after torch's step on it. state: before."""
        self.inner.param_groups = [{**group, "params": [piece]}]
        if state:
            self.inner.state[piece] = state
        self.inner.step()
        piece.grad = None
        return dict(self.inner.state.pop(piece, {}))

    def _is_packed(self, value: Any, parameter: Tensor) -> bool:
        dtype = torch.bfloat16 if self.precision == "bf16" else torch.uint8
        return _has_shape(value, parameter) and value.dtype == dtype

    def _is_unpacked(self, name: str, value: Any, like: Tensor) -> bool:
        is_state = name != "step" and _has_shape(value, like) and value.is_floating_point()
        return is_state and (like.dtype == torch.bfloat16 or not self._is_packed(value, like))

    def _make(self, packed: dict[str, Any], name: str, parameter: Tensor) -> None:
        """Room for a state, in the order of memory of a contiguous tensor."""
        shape, device = parameter.shape, parameter.device
        if self.precision == "bf16":
            packed[name] = torch.zeros(shape, dtype=torch.bfloat16, device=device)
            return
        packed[name] = torch.zeros(shape, dtype=torch.uint8, device=device)
        packed[name + LARGEST] = torch.zeros(_blocks(parameter.numel()), device=device)

    def _read(self, packed: Mapping[str, Any], name: str, parameter: Tensor, part: slice) -> Tensor:
        """Part of a state, unpacked, of one dim."""
        stored: Tensor = packed[name].view(-1)[part]
        if self.precision == "bf16":
            return stored.to(parameter.dtype, copy=True)
        largest = packed[name + LARGEST][_blocks(part.start) : _blocks(part.stop)]
        return of_codes(stored, largest, self._code(name, parameter), parameter.dtype)

    def _write(
        self, packed: Mapping[str, Any], name: str, value: Tensor, part: slice, step: Any
    ) -> None:
        """Pack part of a state, of one dim. In place: states may be in files."""
        if self.precision == "bf16":
            count = torch.as_tensor(0 if step is None else step)
            packed[name].view(-1)[part] = to_bfloat16(value, count)
            return
        codes, largest = to_codes(value, self._code(name, value))
        packed[name].view(-1)[part] = codes
        packed[name + LARGEST][_blocks(part.start) : _blocks(part.stop)] = largest

    def _code(self, name: str, like: Tensor) -> Code:
        """The code of a state, on the device of a tensor."""
        key = name not in UNSIGNED, like.device
        if key not in self._codes:
            self._codes[key] = Code.of(like.device, is_signed=key[0])
        return self._codes[key]


def _parts(numel: int, size: int) -> Iterator[slice]:
    """Slices of so many numbers, at least one."""
    for start in range(0, max(1, numel), max(1, size)):
        yield slice(start, min(numel, start + size))


def _blocks(numel: int) -> int:
    return -(-numel // BLOCK_NUMBERS)


def _check_shapes(state: Mapping[str, Any], number: int, parameter: Tensor) -> None:
    """Raises OptionError for states that are of another parameter, or of another shard."""
    for name, value in state.items():
        wanted: tuple[int, ...] = tuple(parameter.shape)
        if name.endswith(LARGEST):
            wanted = (_blocks(parameter.numel()),)
        if isinstance(value, Tensor) and value.dim() and tuple(value.shape) != wanted:
            raise OptionError(
                f"{name} of parameter {number} was saved with shape {list(value.shape)}, and is to "
                f"have {list(wanted)} here; a state_dict is for the same shards, "
                "meshfold.save_checkpoint goes from plan to plan"
            )


def _has_shape(value: Any, like: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == like.shape
