"""Products in a ring on processes, as torch's fused operators over symmetric memory where there is
no symmetric memory: torch's own fallbacks stand in for them."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory

from meshfold.distributed.rank_mesh import ProcessMesh, process_mesh
from meshfold.distributed.step_context import StepContext
from meshfold.ir.mesh import Mesh, MeshAxis
from meshfold.ops.collective_matmul import all_gather_matmul, matmul_reduce_scatter

ROWS, WIDTH, OUT = 8, 6, 4
Results = list[list[Tensor]]


def on_shared_memory(is_shared: bool) -> Results:
    """Results and gradients of both products on this rank, with one weight and with two."""
    mesh = process_mesh(Mesh((MeshAxis("tp", dist.get_world_size()),)), torch.device("cpu"))
    library = torch.library.Library("symm_mem", "IMPL")
    if is_shared:
        library.impl("fused_all_gather_matmul", _gathered, "CPU")
        library.impl("fused_matmul_reduce_scatter", _scattered, "CPU")
        mesh._shared.add("tp")
    found = [_gather(mesh, count, bias) for count in (1, 2) for bias in (False, True)]
    found += [_scatter(mesh, bias) for bias in (False, True)]
    library._destroy()
    mesh.close()
    return found


_gathered: Callable[..., object] = _symmetric_memory._fused_all_gather_matmul_fallback


def _scattered(x: Tensor, matrix: Tensor, reduction: str, dim: int, group_name: str) -> Tensor:
    """The same as the operator; torch's own has another name in other versions."""
    rows = (x @ matrix).movedim(dim, 0).contiguous()
    functional = torch.ops._c10d_functional
    size = dist.get_world_size()
    own = functional.reduce_scatter_tensor(rows, reduction, size, group_name)
    made: Tensor = functional.wait_tensor(own).movedim(0, dim)
    return made


def _real(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 100 * dist.get_rank())
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def _gather(mesh: ProcessMesh, count: int, has_bias: bool) -> list[Tensor]:
    x = _real(2, ROWS, WIDTH, seed=1)
    weights = [_real(OUT, WIDTH, seed=2 + k) for k in range(count)]
    biases = [_real(OUT, seed=5 + k) if has_bias else None for k in range(count)]
    made = all_gather_matmul(StepContext(mesh), x, weights, biases, 1, 1, False, "tp")
    return _with_gradients(made, [x, *weights, *(b for b in biases if b is not None)])


def _scatter(mesh: ProcessMesh, has_bias: bool) -> list[Tensor]:
    x, weight = _real(2, ROWS, WIDTH, seed=1), _real(WIDTH, OUT, seed=2)
    bias = _real(OUT, seed=3) if has_bias else None
    made = matmul_reduce_scatter(StepContext(mesh), x, weight, bias, 1, 1, True, "tp")
    return _with_gradients([made], [x, weight, *([bias] if bias is not None else [])])


def _with_gradients(made: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    torch.autograd.backward([y.sin().sum() for y in made])
    return [*(y.detach() for y in made), *(x.grad for x in leaves if x.grad is not None)]
