"""The mode, train or eval, that a captured program can run in."""

from torch import nn

from meshfold.errors import OptionError
from meshfold.ir.op_graph import DRAWS, FoldedGraph


class CapturedMode:
    """Which of train and eval mode a captured program can run in."""

    def __init__(self, model: nn.Module, graph: FoldedGraph) -> None:
        self.is_training = model.training
        self._updates_buffers = any(region.graph.mutations for region in graph.regions)
        self._draws = any(op.target in DRAWS for r in graph.regions for op in r.graph.ops)
        self._depends_on_mode = any(map(_depends_on_mode, model.modules()))

    def check(self, is_training: bool) -> None:
        """Raises OptionError if the program cannot run in this mode."""
        if is_training == self.is_training:
            return
        if is_training and self._depends_on_mode:
            raise OptionError(
                "the model was captured in eval mode, without dropout; call model.train() before "
                "meshfold.compile"
            )
        if not is_training and self._updates_buffers:
            raise OptionError(
                "the model was captured in train mode and updates buffers (running statistics); "
                "compile model.eval() for evaluation"
            )
        if not is_training and self._draws:
            raise OptionError(
                "the model was captured in train mode and draws random numbers, which eval mode "
                "may not (drop path, noise); compile model.eval() for evaluation"
            )


_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_STATISTICS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def _depends_on_mode(module: nn.Module) -> bool:
    """Whether a module drops values or keeps statistics in train mode."""
    if isinstance(module, _STATISTICS):
        return True
    # nn.Dropout has `p`; Hugging Face layers keep probabilities as `dropout`, `attention_dropout`.
    is_dropout = isinstance(module, _DROPOUTS)
    return any(
        isinstance(value, float) and value > 0 and ("drop" in name or (is_dropout and name == "p"))
        for name, value in vars(module).items()
    )
