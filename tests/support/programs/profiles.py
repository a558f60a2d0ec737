"""A profile of a made-up machine of two processes."""

from meshfold.cost_models.calibration.points import (
    CollectivePoint,
    ContentionPoint,
    KernelPoint,
    Machine,
    Memory,
    Profile,
)


def example_profile(*, finished: bool = True, num_nodes: int = 1) -> Profile:
    per_node = 2 // num_nodes
    return Profile(
        version=2,
        machine=Machine("cpu-process", "gloo", 2, per_node, 2, "2.13.0"),
        finished=finished,
        memory=Memory(8 * 10**9, 10**9),
        kernels={
            "start": KernelPoint("launch", "float32", 1, 0.0, 0.0, 96.0, 5e-6),
            "copy": KernelPoint("memory", "float32", 1, 0.0, 0.0, 1e8, 1e-2),
            "product": KernelPoint("gemm", "float32", 1, 1e9, 0.0, 1e6, 2e-2),
            "doubles": KernelPoint("gemm", "float64", 1, 1e9, 0.0, 2e6, 4e-2),
            "attention": KernelPoint("attention", "float32", 1, 0.0, 1e8, 1e6, 5e-3),
        },
        collectives={
            f"{kind}/{size}": CollectivePoint(
                kind, float(size), 2, num_nodes, per_node, per_node, 1e-4 + size / 1e9
            )
            for kind in ("all_reduce", "all_gather")
            for size in (2**12, 2**20)
        },
        contention=ContentionPoint(1e-3, 1e-3, 1.5e-3),
        host_bytes_per_s=None,
    )
