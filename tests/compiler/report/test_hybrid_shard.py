"""HSDP in words."""

import io
from dataclasses import replace
from functools import cache

import pytest
from rich.console import Console
from support.programs.schedules import captured_family, nodes_of_two

from meshfold.api import plan_captured
from meshfold.ir.mesh import Mesh
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import Plan
from meshfold.report.hybrid_shard import hybrid_shard_text
from meshfold.report.plan import summary_view
from meshfold.report.search import explain_view


@cache
def planned() -> Plan:
    options = CompileOptions(pins={"dp": 4, "dp_shard": 2, "zero": 3})
    return plan_captured(captured_family("gpt2"), "gpt2", nodes_of_two(4), options)


def test_the_ranks_of_a_node_share_states() -> None:
    assert hybrid_shard_text(planned()) == (
        "ZeRO 3 over 2 ranks of a node, replicated over 2 nodes"
    )


def test_over_what_else_they_may_be_shared() -> None:
    plan = planned()
    (group,) = plan.cluster.groups
    one = replace(plan.cluster, groups=(replace(group, num_nodes=1, devices_per_node=4),))
    assert hybrid_shard_text(replace(plan, cluster=one)).endswith("over 2 such groups")
    apart = replace(plan.cluster, groups=(replace(group, num_nodes=4, devices_per_node=1),))
    assert hybrid_shard_text(replace(plan, cluster=apart)) == (
        "ZeRO 3 over 2 ranks of dp, replicated 2 times"
    )
    assert hybrid_shard_text(replace(plan, mesh=plan.mesh.with_replicas(1))) == ""


@pytest.mark.parametrize("view", ["plan", "explain"])
def test_plan_and_explain_say_it(view: str) -> None:
    plan = planned()
    assert isinstance(plan.mesh, Mesh)
    console = Console(file=io.StringIO(), width=100)
    console.print(summary_view(plan) if view == "plan" else explain_view(plan, plan.regions))
    assert isinstance(console.file, io.StringIO)
    assert "replicated over 2 nodes" in console.file.getvalue()
