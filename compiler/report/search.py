"""What the search did and proved, as text: a section of `show`, and all of `explain`."""

from rich.console import Group, RenderableType
from rich.text import Text

from meshfold.ir.plan import Plan, RegionPlan
from meshfold.report.hybrid_shard import hybrid_shard_text
from meshfold.report.step_time import sum_view
from meshfold.report.tables import indented, section, table_of
from meshfold.report.terminal import lines_view
from meshfold.units import bytes_text, seconds_text


def proof_text(plan: Plan) -> str:
    """One sentence: how good the plan is known to be."""
    bound_s = plan.search.lower_bound_s
    if bound_s <= 0:
        return "no lower bound"
    claim = f"no plan of this search is faster than {seconds_text(bound_s)}"
    step_s = bound_s if plan.simulated is None else plan.simulated.step_s
    if plan.mode == "scheduled" or step_s < bound_s:
        # The additive model hides nothing inside a layer, the simulated step may lie below it.
        claim = (
            f"in the additive model, which is without overlap inside layers, {claim}; this is no "
            "bound of the simulated step"
        )
    text = f"{claim}: optimality gap {100 * plan.gap:.2f} %{_unproven_text(plan)}"
    return text + _memory_limit_text(plan) + _left_out_text(plan)


def _unproven_text(plan: Plan) -> str:
    """Which part of the gap is a choice of simulation."""
    if plan.gap - plan.unproven_gap < 5e-5:
        return ""
    return (
        f", {100 * plan.unproven_gap:.2f} % of it unproven: simulation passed over a plan that "
        "adds up to less"
    )


def _memory_limit_text(plan: Plan) -> str:
    costs = plan.memory_costs
    return f"; the memory limit costs {100 * costs:.1f} %" if costs > 5e-4 else ""


def _left_out_text(plan: Plan) -> str:
    """What the gap is not over."""
    names = [f"{name} ({count:,})" for name, count in plan.search.left_out.items()]
    return f"; left out of the search, without a bound: {', '.join(names)}" if names else ""


def share_text(plan: Plan) -> str:
    """proof_text without seconds, which are of another kind than those of a simulated step."""
    found = plan.search
    if found.lower_bound_s <= 0:
        return "no lower bound"
    text = f"optimality gap {100 * plan.gap:.2f} % as the search adds up times"
    text += _unproven_text(plan)
    assert plan.simulated is not None
    if plan.mode == "scheduled" or plan.simulated.step_s < found.lower_bound_s:
        text += ", which is no bound of the simulated step"
    return text + _memory_limit_text(plan) + _left_out_text(plan)


def search_view(plan: Plan) -> RenderableType:
    """The decision tree and what rules pruned of it, programs priced, bound and meshes."""
    search = plan.search
    tree = table_of("", "leaves", right=("leaves",), fold=("",))
    tree.add_row("decision tree", f"{search.num_leaves:,}")
    for rule, count in search.pruned.items():
        tree.add_row(f"pruned: {rule}", f"-{count:,}")
    left = search.num_leaves - sum(search.pruned.values())
    tree.add_row("left", f"{left:,}")
    facts = [
        f"{search.num_priced} programs priced exactly, {search.num_infeasible} of them did not fit",
        proof_text(plan),
        f"before the mix was closed: {100 * search.gap_before:.2f} %"
        + ("; a search stopped at its limit" if search.capped else ""),
    ]
    if plan.simulated is not None:
        added = seconds_text(plan.time.step_s)
        facts.append(f"times of the search are added up: {added} for this plan ('explain')")
    meshes = table_of("mesh", "bound", "best", "", right=("bound", "best"), fold=("",))
    for outcome in search.meshes:
        best = seconds_text(outcome.step_s) if outcome.step_s is not None else "-"
        meshes.add_row(outcome.mesh, seconds_text(outcome.lower_bound_s), best, outcome.reason)
    return Group(
        indented(tree), indented(Text("\n".join(facts), style="dim")), Text(), indented(meshes)
    )


def explain_view(plan: Plan, regions: tuple[RegionPlan, ...]) -> RenderableType:
    """Per region the strategy taken and the best that lost, each with the reason."""
    states = hybrid_shard_text(plan)
    lines = [
        f"{plan.model.name} on {plan.cluster.name}: {plan.mesh}",
        *([states] if states else []),
    ]
    sections: list[RenderableType] = [lines_view(lines), *sum_view(plan)]
    for region in regions:
        title = (
            f"Region {region.name}  {region.num_instances} x "
            f"{region.example_scope or 'the whole model'}"
        )
        sections.append(section(title, _choices(region)))
    sections.append(section("Other meshes", search_view(plan)))
    return Group(*sections)


def _choices(region: RegionPlan) -> RenderableType:
    table = table_of(
        "strategy", "time", "resident", "", right=("time", "resident"), fold=("strategy", "")
    )
    for row in (region.choice, *region.alternatives):
        table.add_row(
            row.name,
            seconds_text(row.time_s),
            bytes_text(row.resident_bytes),
            row.reason,
            style="bold green" if row is region.choice else "",
        )
    note = "  time of one instance, exposed communication and optimizer included; per rank"
    return Group(indented(table), Text(note, style="dim"))
