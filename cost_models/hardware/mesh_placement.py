"""The mesh of a choice of degrees: which axis is on which links of the cluster.

dp is outermost (its groups cross nodes first, one large message per region hides well), tp
innermost (on the fastest links, many small messages in the critical path), cp between them: it
exchanges activations around attention alone. ep, which shards the batch as dp does, is inside of
dp: it exchanges tokens around experts. pp, where it is asked for, is outside of all: stages
exchange least, and with their neighbours only.
"""

from meshfold.cost_models.hardware.topology import group_shape, slowest_link
from meshfold.errors import ClusterSpecError
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.mesh import Mesh, MeshAxis


def build_mesh(
    cluster: ClusterSpec,
    dp: int,
    tp: int,
    pp: int = 1,
    *,
    cp: int = 1,
    ep: int = 1,
    replicas: int = 1,
) -> Mesh:
    """The mesh of pp x dp x ep x cp x tp ranks, axes of one rank left out (one device: a mesh of no
    axes). replicas: runs of dp ranks that ZeRO shards within, neighbours on the mesh.

    Each axis names the slowest link that its groups cross. Raises ClusterSpecError when the
    cluster has fewer devices.
    """
    degrees = (("pp", pp), ("dp", dp), ("ep", ep), ("cp", cp), ("tp", tp))
    for name, size in degrees:
        if size < 1:
            raise ClusterSpecError(f"groups: {name}={size} is no degree; write 1 or more")
    num_ranks = pp * dp * ep * cp * tp
    if num_ranks > cluster.num_devices:
        product = " x ".join(
            f"{name}={size}" for name, size in degrees if size > 1 or name in ("dp", "tp")
        )
        raise ClusterSpecError(
            f"groups: {product} needs {num_ranks} devices, "
            f"cluster {cluster.name} has {cluster.num_devices}"
        )
    axes = tuple(MeshAxis(name, size) for name, size in degrees if size > 1)
    bare = Mesh(axes)
    mesh = Mesh(
        tuple(
            MeshAxis(a.name, a.size, slowest_link(cluster, group_shape(cluster, bare, (k,))).name)
            for k, a in enumerate(axes)
        )
    )
    return mesh.with_replicas(replicas)
