"""Bounds on pipelines in closed form, and what a microbatch pays to cross from stage to stage.

bubble_factor: with t_i seconds of one microbatch on stage i of p, T their sum, pre_i and U_i the
sums before and behind i, m microbatches and w_i warm-up forwards (makespan.py), for every stage i

    makespan >= T + U_i + (m - 1 - w_i) t_i      where m >= w_i + 2                       (a_i)
    makespan >= pre_i + m t_i                                                             (b_i)

whatever the shares of forward and backward. Take (b_i) for the first k stages and (a_i) for the
rest, and the mean with weights that make the coefficients of all t_j equal: it is free of the t_j,

    makespan >= T / (1 - (1 - 1/m)^k / (2 - prod_{i >= k} (1 - 1 / (m - 1 - w_i))))

and the best k counts. For the least warm-up, w_i = p - 1 - i, m > p and k = 0 it is
T (m + p - 1) / p, what even stages take.

split_bubble_factor: under zero_bubble the backward through the stages before i may be over before
the weight gradients of i are, so that only their forwards are sure to come before it. With at least
a share s of every stage's time forward, makespan >= s pre_i + m t_i; the same mean gives

    makespan >= T s / (1 - (1 - s/m)^p)
"""

from meshfold.cost_models.hardware.topology import group_shape, slowest_link
from meshfold.cost_models.op_costs.collective_time import transfer_s
from meshfold.ir.cluster import ClusterSpec, LinkSpec
from meshfold.ir.mesh import Mesh


def bubble_factor(num_stages: int, num_microbatches: int, extra_warm_up: int = 0) -> float:
    """No division of T seconds into stages makes a 1f1b step of less than this times T.

    extra_warm_up: as of schedules.Schedule; the bound holds for every smaller one, too.
    """
    p, m = num_stages, num_microbatches
    depths = [p - 1 - i + min(extra_warm_up, p - 1 - i) for i in range(p)]
    best, product = 1 / (1 - (1 - 1 / m) ** p), 1.0
    for k in reversed(range(p)):
        room = m - 1 - depths[k]
        if room < 1:
            break
        product *= 1 - 1 / room
        best = max(best, 1 / (1 - (1 - 1 / m) ** k / (2 - product)))
    return best


def split_bubble_factor(num_stages: int, num_microbatches: int, forward_share: float) -> float:
    """No division of T seconds into stages makes a zero_bubble step of less than this times T."""
    p, m = num_stages, num_microbatches
    if forward_share <= 0:
        return m / p
    return forward_share / (1 - (1 - forward_share / m) ** p)


def hop_link(cluster: ClusterSpec, mesh: Mesh) -> LinkSpec:
    """The slowest link between neighbours on the pp axis."""
    return slowest_link(cluster, group_shape(cluster, mesh, (mesh.index("pp"),)))


def hop_s(num_bytes: float, link: LinkSpec) -> float:
    """Seconds to send `num_bytes` of one rank to the same rank of the next stage."""
    return transfer_s(num_bytes, link)
