"""The mode, train or eval, that a captured program can run in, and what it trains."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from meshfold.errors import OptionError
from meshfold.ir.op_graph import DRAWS, FoldedGraph


class CapturedMode:
    """Which of train and eval mode a captured program can run in, and what it trains."""

    def __init__(self, model: nn.Module, graph: FoldedGraph) -> None:
        self.is_training = model.training
        self._updates_buffers = any(region.graph.mutations for region in graph.regions)
        self._draws = any(op.target in DRAWS for r in graph.regions for op in r.graph.ops)
        self._depends_on_mode = any(map(depends_on_mode, model.modules()))
        self._frozen = [p.name for p in graph.parameters if p.used and not p.requires_grad]

    def check(self, is_training: bool) -> None:
        """Raises OptionError if no program can run in this mode."""
        if is_training and not self.is_training and self._depends_on_mode:
            raise OptionError(
                "the model was captured in eval mode, without dropout; call model.train() before "
                "meshfold.compile"
            )

    def needs_capture(self, is_training: bool) -> bool:
        """Whether this mode needs a program of its own, which the captured one cannot become."""
        return self.is_training and not is_training and (self._updates_buffers or self._draws)

    def check_program(self, is_training: bool) -> None:
        """Raises OptionError if the captured program itself cannot run in this mode."""
        if self.needs_capture(is_training):
            does = (
                "updates buffers (running statistics)"
                if self._updates_buffers
                else "draws random numbers, which eval mode may not (drop path, noise)"
            )
            raise OptionError(
                f"the model was captured in train mode and {does}; evaluate it under "
                "torch.no_grad(), or compile model.eval()"
            )

    def check_trained(self, parameters: Mapping[str, Tensor]) -> None:
        """Raises OptionError where a backward would reach a parameter, by canonical name, that was
        frozen when the model was captured: no program adds up its gradients over ranks."""
        if torch.is_grad_enabled() and (thawed := self._thawed(parameters)):
            raise OptionError(
                f"{thawed[0]} (of {len(thawed)} parameters) was frozen when the model was "
                "compiled, and the plan has no gradient of it; compile the model with "
                "requires_grad set, and freeze the parameters of the compiled model until then"
            )

    def thawed_text(self, parameters: Mapping[str, Tensor]) -> str:
        """For the comparison of calls: stages without such a parameter are to stop, too."""
        thawed = self._thawed(parameters)
        return f" with gradients of {thawed[0]}, frozen when it was compiled," if thawed else ""

    def _thawed(self, parameters: Mapping[str, Tensor]) -> list[str]:
        return [n for n in self._frozen if n in parameters and parameters[n].requires_grad]


_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_STATISTICS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def depends_on_mode(module: nn.Module) -> bool:
    """Whether a module drops values or keeps statistics in train mode."""
    if isinstance(module, _STATISTICS):
        return True
    # nn.Dropout has `p`; Hugging Face layers keep probabilities as `dropout`, `attention_dropout`.
    is_dropout = isinstance(module, _DROPOUTS)
    return any(
        isinstance(value, float) and value > 0 and ("drop" in name or (is_dropout and name == "p"))
        for name, value in vars(module).items()
    )
