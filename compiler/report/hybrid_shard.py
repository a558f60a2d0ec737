"""What HSDP does, in words: over which ranks ZeRO shards, and over which it replicates."""

from meshfold.cost_models.hardware.topology import group_shape
from meshfold.ir.mesh import SHARD_AXIS
from meshfold.ir.plan import Plan


def hybrid_shard_text(plan: Plan) -> str:
    """ "ZeRO 3 over 8 ranks of a node, replicated over 4 nodes"; empty for all other plans."""
    mesh, levels = plan.mesh, {region.strategy.zero for region in plan.regions} - {0}
    if mesh.replicas == 1 or not levels:
        return ""
    storage = mesh.storage
    axis = storage.index(SHARD_AXIS)
    size = storage.sizes[axis]
    zero = " and ".join(map(str, sorted(levels)))
    inside = group_shape(plan.cluster, storage, (axis,))
    if inside.crosses_nodes:
        return f"ZeRO {zero} over {size} ranks of dp, replicated {mesh.replicas} times"
    nodes = group_shape(plan.cluster, storage, (axis - 1,)).num_nodes
    over = f"{nodes} nodes" if nodes == mesh.replicas else f"{mesh.replicas} such groups"
    return f"ZeRO {zero} over {size} ranks of a node, replicated over {over}"
