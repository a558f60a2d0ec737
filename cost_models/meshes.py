"""The meshes a cluster offers: every factorisation of its devices over data and tensor parallel.

dp is outermost (its groups cross nodes first, one large message per region hides well), tp
innermost (on the fastest links, many small messages in the critical path). pp, where it is asked
for, is outside of both: stages exchange least, and with their neighbours only.
"""

from collections.abc import Iterator

from meshfold.cluster import ClusterSpec
from meshfold.cost_models.topology import group_shape, slowest_link
from meshfold.errors import ClusterSpecError
from meshfold.mesh import Mesh, MeshAxis


def build_mesh(cluster: ClusterSpec, dp: int, tp: int, pp: int = 1) -> Mesh:
    """The mesh of pp x dp x tp ranks, axes of one rank left out (one device: a mesh of no axes).

    Each axis names the slowest link that its groups cross. Raises ClusterSpecError when the
    cluster has fewer devices.
    """
    degrees = (("pp", pp), ("dp", dp), ("tp", tp))
    for name, size in degrees:
        if size < 1:
            raise ClusterSpecError(f"groups: {name}={size} is no degree; write 1 or more")
    if pp * dp * tp > cluster.num_devices:
        pipeline = f"pp={pp} x " if pp > 1 else ""
        raise ClusterSpecError(
            f"groups: {pipeline}dp={dp} x tp={tp} needs {pp * dp * tp} devices, "
            f"cluster {cluster.name} has {cluster.num_devices}"
        )
    axes = tuple(MeshAxis(name, size) for name, size in degrees if size > 1)
    bare = Mesh(axes)
    return Mesh(
        tuple(
            MeshAxis(a.name, a.size, slowest_link(cluster, group_shape(cluster, bare, (k,))).name)
            for k, a in enumerate(axes)
        )
    )


def mesh_candidates(cluster: ClusterSpec, num_devices: int) -> Iterator[Mesh]:
    """Every mesh dp x tp = num_devices, by rising tp. Raises ClusterSpecError as build_mesh."""
    if num_devices < 1:
        raise ClusterSpecError(f"devices: {num_devices} devices cannot run anything; ask for 1+")
    for tp in range(1, num_devices + 1):
        if num_devices % tp == 0:
            yield build_mesh(cluster, num_devices // tp, tp)
