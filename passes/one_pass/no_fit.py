"""What is said where no program in one pass fits."""

from dataclasses import dataclass, fields

from meshfold.errors import InfeasibleError
from meshfold.ir.memory_estimate import MemoryEstimate
from meshfold.passes.one_pass.search import MeshPlanner
from meshfold.units import bytes_text


@dataclass(frozen=True)
class NoMeshFits:
    """A search that found no plan."""

    planners: tuple[MeshPlanner, ...]
    """Of the meshes that have programs."""
    is_proven: bool
    """Whether a bound excludes every other program, too; the search may else have missed one."""

    @property
    def words(self) -> str:
        """What a message may say of it."""
        return "nothing fits" if self.is_proven else "found nothing that fits"

    def and_in(self, other: "NoMeshFits") -> "NoMeshFits":
        """This search and another one."""
        return NoMeshFits((*self.planners, *other.planners), self.is_proven and other.is_proven)

    def error(self, num_devices: int, *, explains: bool) -> InfeasibleError:
        """What to say of it; explains: and of the program with the least memory of all."""
        capacity_bytes = self.planners[0].capacity_bytes
        found = f"{self.words} in {bytes_text(capacity_bytes)} per device on {num_devices} devices"
        if not explains:
            return InfeasibleError(
                found, binding_constraint="memory", available_bytes=capacity_bytes
            )
        smallest = [planner.smallest for planner in self.planners]
        best = min(smallest, key=lambda p: (p.memory.peak, p.strategy.label))
        memory, label = best.memory, best.strategy.label
        component, size = _largest_component(memory)
        return InfeasibleError(
            f"{found}: the best candidate, {label}, needs {bytes_text(memory.peak)}, most of it "
            f"{component} ({bytes_text(size)}); {bytes_text(memory.peak - capacity_bytes)} are "
            "missing; use more devices, more memory or a smaller batch",
            binding_constraint=component,
            best_candidate=label,
            required_bytes=memory.peak,
            available_bytes=capacity_bytes,
        )


def _largest_component(memory: MemoryEstimate) -> tuple[str, int]:
    sizes = {f.name: getattr(memory, f.name) for f in fields(memory) if f.name != "capacity"}
    name = max(sizes, key=lambda n: (sizes[n], n))
    return name.replace("_", " "), sizes[name]
