"""Calls that factorize, invert and solve matrices by the dozen, of other ops that look at the last
dims of their operand, and of einsum."""

import torch
from torch import Tensor

from support.graphs.calls import Sample, X, call
from support.graphs.tensors import halves, real, special, steps, whole

_BATCH = (4, 12)


def _square(*batch: int, seed: int = 7) -> Tensor:
    """Matrices far from singular, of different eigenvalues."""
    x = real(*batch, 3, 3, grad=False, seed=seed)
    return (x + torch.diag(torch.tensor([2.0, 3.0, 5.0]))).requires_grad_()


def _shuffled(*batch: int) -> Tensor:
    """The same with rows in an order of their own: what is pivoted differs."""
    order = real(*batch, 3, grad=False, seed=5).argsort(-1)
    x = _square(*batch).detach().take_along_dim(order.unsqueeze(-1), -2)
    return x.requires_grad_()


def _definite(*batch: int) -> Tensor:
    x = _square(*batch).detach()
    return (x @ x.mT).requires_grad_()


def _lower(*batch: int) -> Tensor:
    return _square(*batch).detach().tril().requires_grad_()


def _reflections(*batch: int) -> tuple[Tensor, Tensor]:
    vectors, factors = torch.geqrf(real(*batch, 4, 3, grad=False))
    return vectors.requires_grad_(), factors.requires_grad_()


LINALG: tuple[Sample, ...] = (
    call("linalg_cholesky.default", _definite(*_BATCH)),
    call("linalg_inv.default", _square(*_BATCH)),
    call("linalg_pinv.atol_rtol_tensor", real(*_BATCH, 4, 3)),
    call("linalg_pinv.atol_rtol_tensor", _square(*_BATCH), atol=real(*_BATCH, grad=False) / 99),
    call("linalg_pinv.atol_rtol_float", real(*_BATCH, 4, 3), atol=1e-9),
    call("linalg_pinv.default", _square(*_BATCH), 1e-9),
    call("_linalg_solve_ex.default", _shuffled(*_BATCH), real(*_BATCH, 3, 2)),
    call("_linalg_solve_ex.default", _shuffled(*_BATCH), real(*_BATCH, 3)),
    call("linalg_householder_product.default", *_reflections(*_BATCH)),
    call("linalg_matrix_exp.default", real(*_BATCH, 3, 3)),
    call("linalg_matrix_power.default", _square(*_BATCH), 3),
    call("_linalg_det.default", _shuffled(*_BATCH)),
    call("_linalg_slogdet.default", _shuffled(*_BATCH)),
    call("linalg_qr.default", real(*_BATCH, 4, 3)),
    call("_linalg_svd.default", _square(*_BATCH)),
    call("_linalg_eigh.default", _definite(*_BATCH)),
    call("linalg_solve.default", _square(*_BATCH), real(*_BATCH, 3, 2)),
    call("linalg_solve.default", _square(*_BATCH), real(*_BATCH, 3)),
    call("linalg_solve.default", _square(12), real(4, 12, 3, 1)),
    call("linalg_solve_triangular.default", _lower(*_BATCH), real(12, 3, 2), upper=False),
    call("cholesky_solve.default", real(*_BATCH, 3, 2), _lower(*_BATCH)),
    call("linalg_cross.default", real(*_BATCH, 3), real(1, 12, 3, seed=9)),
    call("linalg_cross.default", real(3, 12, 4), real(3, 12, 4, seed=9), dim=0),
    call(
        "_trilinear.default",
        *(real(4, 12), real(24, 12, 6), real(4, 6)),
        *([1, 3], [0], [1, 2], [2, 3]),
    ),
    call("rot90.default", real(*X), 1, [1, 2]),
    call("diagonal_scatter.default", real(4, 12, 24, 3), real(4, 24, 3), 0, 1, 3),
    call("index_reduce.default", real(*X), 1, whole(12, 24), real(4, 24, 24), "amax"),
    call("renorm.default", real(*X), 2, 1, 0.5),
    call("mode.default", halves(*X)),
    call("quantile.scalar", real(*X), 0.3, 1, True),
    call("nanquantile.scalar", special(*X), 0.3),
    call("isin.Tensor_Tensor", whole(9, *X), whole(9, 4)),
    call("searchsorted.Tensor", real(*X, grad=False).sort()[0], real(4, 12, 36, grad=False)),
    call("searchsorted.Tensor", real(24, grad=False).sort()[0], real(*X, grad=False), right=True),
    call("frexp.Tensor", steps(*X)),
    call("round.decimals", steps(*X), decimals=1),
    call("mvlgamma.default", 3.0 + real(*X).detach(), 2),
    call("heaviside.default", whole(3, *X).double() - 1, real(12, 1, grad=False)),
    call("special_zeta.default", 1 + real(*X, grad=False), real(12, 1, grad=False)),
    call("special_zeta.other_scalar", 1 + real(*X, grad=False), 0.5),
    call(
        "fractional_max_pool2d.default",
        real(4, 12, 6, 6),
        [2, 2],
        [3, 3],
        real(4, 12, 2, grad=False),
    ),
    call("unfold_backward.default", real(4, 12, 5, 4), [4, 12, 12], -1, 4, 2),
    call("unfold_backward.default", real(4, 5, 24, 4), [4, 12, 24], 1, 4, 2),
    call("affine_grid_generator.default", real(12, 2, 3), [12, 4, 3, 5], False),
    call("affine_grid_generator.default", real(12, 3, 4), [12, 4, 2, 3, 5], True),
    call("einsum.default", "bsd,edh->besh", [real(4, 3, 12), real(12, 12, 4)]),
    call("einsum.default", "bsd, bs -> d", [real(4, 12, 12), real(4, 12)]),
    call("einsum.default", "...qd,...kd->...qk", [real(4, 12, 6, 4), real(12, 12, 4)]),
    call("einsum.default", "...nd,gd", [real(4, 1, 12), real(12, 12)]),
    call("einsum.default", "B I D, B R D -> B I R", [real(4, 12, 6), real(4, 24, 6)]),
    call("einsum.default", "ij,jk,kl->il", [real(4, 12), real(12, 24), real(24, 2)]),
    call("einsum.default", "bhs,hs->bh", [real(4, 12, 24), real(12, 1)]),
    call("einsum.default", "bii->b", [real(4, 12, 12)]),
    call("einsum.default", "bij,bkk->ji", [real(4, 12, 24), real(4, 3, 3)]),
)
