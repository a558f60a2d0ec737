"""Representative calls of losses, for the rule table (see support.graphs.samples)."""

import torch
from torch import Tensor

from support.graphs.calls import Sample, X, call
from support.graphs.ops import SingleOp
from support.graphs.tensors import flags, real, steps, targets, whole


def _logits(*shape: int) -> Tensor:
    return (9 * real(*shape).detach()).requires_grad_()


def _signs(*shape: int) -> Tensor:
    """1 or -1: the classes of the hinge and soft margin losses, which hinge compares with."""
    return torch.where(real(*shape, grad=False, seed=9) > 0.5, 1.0, -1.0).double()


_SIGNS = ("soft_margin_loss", "hinge_embedding_loss")


def _ctc(zero_infinity: bool) -> Sample:
    """Of one target there are more labels than inputs: an infinite loss, or none."""
    target = "meshfold.ctc_loss.default"
    lengths = whole(3, 12) + 4, torch.tensor([*range(4), 0, 6, *range(6)])
    longest = lengths[1] if zero_infinity else lengths[1].clamp(max=2)
    log_probs = _logits(6, 12, 8).detach().log_softmax(-1).requires_grad_()
    tensors = log_probs, whole(7, 12, 6) + 1, lengths[0], longest
    return target, lambda: SingleOp(target, *tensors, 0, zero_infinity)


LOSS: tuple[Sample, ...] = (
    _ctc(zero_infinity=False),
    _ctc(zero_infinity=True),
    call("cross_entropy_loss.default", _logits(24, 36), targets(24, 36)),
    call("cross_entropy_loss.default", _logits(24, 36), targets(24, 36), None, 2),
    call("cross_entropy_loss.default", _logits(24, 36), targets(24, 36), None, 0),
    call("cross_entropy_loss.default", _logits(24, 36), whole(36, 24), None, 1, 4),
    call("cross_entropy_loss.default", _logits(12, 24, 4), targets(48, 24).reshape(12, 4)),
    *(
        call("cross_entropy_loss.default", _logits(24, 36), targets(24, 36), *others)
        for reduction in (0, 1, 2)
        for others in (
            (real(36, grad=False), reduction),
            (None, reduction, -100, 0.3),
            (real(36, grad=False), reduction, -100, 0.3),
        )
    ),
    call(
        *("cross_entropy_loss.default", _logits(12, 24, 4), targets(48, 24).reshape(12, 4)),
        *(real(24, grad=False), 1, -100, 0.3),
    ),
    *(
        call("cross_entropy_loss.default", _logits(24, 12), real(24, 12, seed=9), None, reduction)
        for reduction in (0, 1, 2)
    ),
    call(
        *("cross_entropy_loss.default", _logits(12, 4, 24), real(12, 4, 24, seed=9)),
        *(real(4, grad=False), 1, -100, 0.2),
    ),
    *(
        call("nll_loss_nd.default", _logits(24, 12), targets(24, 12), weight, reduction)
        for reduction in (0, 1, 2)
        for weight in (None, real(12, grad=False))
    ),
    call("nll_loss_nd.default", _logits(12, 4, 24), targets(288, 4).reshape(12, 24)),
    *(
        call(
            *(f"{name}.default", real(12, 24)),
            *(_signs(12, 24) if name in _SIGNS else real(12, 24, seed=9), *given),
        )
        for reduction in (0, 1, 2)
        for name, *given in (
            ("mse_loss", reduction),
            ("l1_loss", reduction),
            ("smooth_l1_loss", reduction, 0.2),
            ("huber_loss", reduction, 0.2),
            ("soft_margin_loss", reduction),
            ("hinge_embedding_loss", 0.5, reduction),
            ("poisson_nll_loss", True, True, 1e-8, reduction),
            ("kl_div", reduction),
            ("binary_cross_entropy", None, reduction),
            ("binary_cross_entropy_with_logits", None, None, reduction),
        )
    ),
    call("kl_div.default", real(12, 24), real(12, 24, seed=9), 2, log_target=True),
    call(
        "binary_cross_entropy.default", real(12, 24), real(12, 24, seed=9), real(12, 1, grad=False)
    ),
    call(
        *("binary_cross_entropy_with_logits.default", real(12, 24), real(12, 24, seed=9)),
        *(real(12, 24, grad=False, seed=3), real(24, grad=False), 1),
    ),
    *(
        call(
            *("margin_ranking_loss.default", real(12, 24), real(12, 24, seed=9)),
            *(real(12, 24, grad=False, seed=3), 0.5, reduction),
        )
        for reduction in (0, 1, 2)
    ),
    *(
        call(
            *("cosine_embedding_loss.default", real(12, 24), steps(12, 24)),
            *(flags(12).double() * 2 - 1, 0.1, reduction),
        )
        for reduction in (0, 1, 2)
    ),
    *(
        call(
            *("triplet_margin_loss.default", real(12, 24), real(12, 24, seed=9)),
            *(real(12, 24, seed=3), 1.0, 2.0, 1e-6, False, reduction),
        )
        for reduction in (0, 1, 2)
    ),
    call("cosine_similarity.default", real(*X), real(12, 24, seed=9), -1),
    call("cosine_similarity.default", real(*X), real(*X, seed=9)),
    call("pairwise_distance.default", real(12, 24), real(12, 24, seed=9)),
    call("pairwise_distance.default", real(*X), real(*X, seed=9), 1.0, 1e-6, True),
)
