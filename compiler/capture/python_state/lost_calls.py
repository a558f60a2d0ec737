"""Calls of torch that a trace takes no notice of, and hooks: refused, since they would be lost."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshfold.errors import CaptureError
from meshfold.torch_compat.autograd_engine import saved_tensor_hooks_met
from meshfold.torch_compat.source_lines import is_user_file


def refuse_gradient_hooks(model: nn.Module) -> None:
    """Raises CaptureError for a parameter with hooks, which would not run on its shards, and for a
    module with hooks of its backward, which a graph of ops has no place for."""
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(
                f"{path or type(module).__name__} has hooks of its backward, which would not run; "
                "remove them, or write what they do with ordinary ops in forward",
                op="nn.Module.register_full_backward_hook",
            )
    for name, parameter in model.named_parameters():
        accumulated = getattr(parameter, "_post_accumulate_grad_hooks", None)
        if getattr(parameter, "_backward_hooks", None) or accumulated:
            raise CaptureError(
                f"{name} has hooks of its gradient, which would not run; register them on the "
                "parameter of the compiled model, which is this rank's shard",
                op="Tensor.register_hook",
            )


_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]

_REFUSED: tuple[tuple[Any, str, str], ...] = (
    (
        _SET_DATA,
        "Tensor.data =",
        "compute a new tensor, write to a buffer with copy_ under torch.no_grad, or change a "
        "parameter between steps",
    ),
    (torch.Tensor.register_hook, "Tensor.register_hook", "write what it does with ordinary ops"),
    (
        torch.Tensor.register_post_accumulate_grad_hook,
        "Tensor.register_post_accumulate_grad_hook",
        "register it on the compiled model's parameter",
    ),
    (torch.Tensor.backward, "Tensor.backward", "return a loss, and call backward outside"),
)


def refuse_call(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], line: Callable[[], str]
) -> None:
    """Raises CaptureError for a function of torch that a traced forward would lose, or crash on."""
    if torch.is_inference_mode_enabled():
        raise CaptureError(
            "what torch.inference_mode keeps from the gradient is lost in a graph; use "
            "torch.no_grad inside of forward, and compile outside of either",
            op="torch.inference_mode",
            source=line(),
        )
    if func in GRADIENT_MARKS and isinstance(args[0], nn.Parameter):
        wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
        if wanted != args[0].requires_grad:
            raise CaptureError(
                f"forward sets requires_grad of a parameter to {wanted}, which a graph of one call "
                "cannot hold; freeze it before it is compiled, or use its detach() where no "
                "gradient is to flow",
                op="Tensor.requires_grad_",
                source=line(),
            )
    for other, name, remedy in _REFUSED:
        if func == other:
            raise CaptureError(
                f"{name} inside of forward is lost in a graph; {remedy}", op=name, source=line()
            )


GRADIENT_MARKS = (torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
"""What sets requires_grad of a tensor."""


@contextmanager
def refuse_saved_tensor_hooks(line: Callable[[], str]) -> Iterator[None]:
    """Raises CaptureError where forward chooses what its backward reads; torch's own way to keep
    it on the host changes no number."""

    def met(*hooks: Any) -> None:
        files = [getattr(inspect.unwrap(h), "__code__", None) for h in hooks]
        if any(code is None or is_user_file(code.co_filename) for code in files):
            raise CaptureError(
                "saved_tensors_hooks inside of forward are lost in a graph, whose plan chooses "
                "what is kept and where; leave them out",
                op="torch.autograd.graph.saved_tensors_hooks",
                source=line(),
            )

    with saved_tensor_hooks_met(met):
        yield


@dataclass(frozen=True)
class _DataRead:
    """given: what x.data gave `of` x; version: of its memory, then."""

    given: torch.Tensor
    of: torch.Tensor
    version: int
    source: str


class DataReads:
    """x.data in forward, which is x.detach() as long as nothing writes to either. Where x has no
    gradient (a buffer, `self.mean.data.mul_(0.9)`), a write is one to x, unless a backward reads
    what was there before: torch would compute it with the new values, and say nothing."""

    def __init__(self) -> None:
        self.reads: list[_DataRead] = []
        self.values: list[_DataRead] = []
        """What x.data was set to, which shares its memory with x then."""

    def sets(self, func: Any, args: Sequence[Any], line: Callable[[], str]) -> bool:
        """Whether x.data was set: to what was given for it, as `x.data += 1` does, or by a write to
        x, where x has no gradient and its like is given."""
        if func != _SET_DATA:
            return False
        x, value = args
        if any(read.given is value and read.of is x for read in self.reads):
            return True
        is_like = isinstance(value, torch.Tensor) and (
            (x.shape, x.dtype, x.device) == (value.shape, value.dtype, value.device)
        )
        if x.requires_grad or not is_like:
            return False
        with torch.no_grad():
            x.copy_(value)
        self.values.append(_DataRead(value, x, value._version, line()))
        return True

    def answer(self, func: Any, args: Sequence[Any], line: Callable[[], str]) -> Any:
        """What x.data gives here; None for another function."""
        if func != torch.Tensor.data.__get__:  # type: ignore[attr-defined]
            return None
        given = args[0].detach()
        self.reads.append(_DataRead(given, args[0], given._version, line()))
        return given

    def refuse_written(self, returned: Iterable[torch.Tensor]) -> None:
        """Raises CaptureError where memory that counts was written to after x.data was read.
        returned: what the backward of forward starts from."""
        shared = [v for v in self.values if v.given._version != v.version]
        if shared:
            raise CaptureError(
                "a write to what Tensor.data was set to changes both, which a graph loses; write "
                "to the tensor itself with copy_ under torch.no_grad",
                op="Tensor.data",
                source=shared[0].source,
            )
        written = [read for read in self.reads if read.given._version != read.version]
        trained = [read for read in written if read.of.requires_grad]
        if trained:
            raise CaptureError(
                "a write to the memory of Tensor.data inside of forward is lost in a graph; "
                "compute a new tensor of x.detach()",
                op="Tensor.data",
                source=trained[0].source,
            )
        if written and _reads_what_was(x.grad_fn for x in returned if x.grad_fn is not None):
            raise CaptureError(
                "a write to the memory of Tensor.data changes what the backward of an op before it "
                "reads, which no graph does; let that op read a clone",
                op="Tensor.data",
                source=written[0].source,
            )


def _reads_what_was(nodes: Iterable[Any]) -> bool:
    """Whether a backward that starts at these nodes needs a tensor that was written to since."""
    left, seen = list(nodes), set()
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        left.extend(other for other, _ in node.next_functions if other is not None)
        for name in dir(node):
            if not name.startswith("_saved_"):
                continue
            try:
                getattr(node, name)
            except RuntimeError as error:
                if "modified by an inplace operation" in str(error):
                    return True
    return False
