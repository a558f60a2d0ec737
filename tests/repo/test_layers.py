"""Imports go down the folders in one order, and torch is met from one folder on."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "compiler": "meshfold",
    "passes": "meshfold.passes",
    "cost_models": "meshfold.cost_models",
}

# Every folder imports from folders above its own line only (and from itself).
ORDER = (
    "meshfold.ir",
    "meshfold.hierarchical_all_reduce",
    "meshfold.plan_file",
    "meshfold.cost_models.hardware",
    "meshfold.cost_models.op_costs",
    "meshfold.cost_models.calibration",
    "meshfold.cost_models.memory",
    "meshfold.cost_models.pipeline",
    "meshfold.cost_models.simulation",
    "meshfold.passes.fold",
    "meshfold.passes.graph",
    "meshfold.passes.rules.ops",
    "meshfold.passes.rules",
    "meshfold.passes.run",
    "meshfold.passes.schedule",
    "meshfold.passes.price",
    "meshfold.passes.memory",
    "meshfold.passes.events",
    "meshfold.passes.stages",
    "meshfold.passes.region",
    "meshfold.passes.split",
    "meshfold.passes.chained_chunks",
    "meshfold.passes.collective_matmul",
    "meshfold.passes.one_pass",
    "meshfold.passes.pipeline",
    "meshfold.passes.planner",
    "meshfold.report",
    "meshfold.torch_compat",
    "meshfold.distributed",
    "meshfold.sharding",
    "meshfold.checkpoint_files",
    "meshfold.ops.fused",
    "meshfold.ops",
    "meshfold.zero",
    "meshfold.memory_probe",
    "meshfold.capture.expert_loops",
    "meshfold.capture.known_values",
    "meshfold.capture.library_modules",
    "meshfold.capture.masked_rows",
    "meshfold.capture.python_state",
    "meshfold.capture.gradients",
    "meshfold.capture.trace",
    "meshfold.capture.dedup",
    "meshfold.capture.rewrites",
    "meshfold.capture.custom_ops",
    "meshfold.capture",
    "meshfold.profiling",
    "meshfold.codegen.program",
    "meshfold.codegen.schedule",
    "meshfold.codegen.chained_chunks",
    "meshfold.codegen.emit",
    "meshfold.refine",
    "meshfold.offload",
    "meshfold.low_precision",
    "meshfold.runtime",
    "meshfold.training.shards",
    "meshfold.training.calls",
    "meshfold.training",
    "meshfold.training.saving",
    "meshfold.models",
    "meshfold.api",
    "meshfold.studies",
    "meshfold.validation",
    "meshfold.cli",
)
FIRST_WITH_TORCH = ORDER.index("meshfold.torch_compat")
FACE_WITHOUT_TORCH = {
    "meshfold.cli.arguments",
    "meshfold.cli.command",
    "meshfold.cli.explain_command",
    "meshfold.cli.main",
    "meshfold.cli.plan_command",
    "meshfold.cli.profile_command",
    "meshfold.cli.search_options",
    "meshfold.cli.sweep_command",
}
SHARED = {"meshfold.errors", "meshfold.units", "meshfold.gc_pause", "meshfold._version"}
"""Files of the root that every folder may use; they import each other at most."""


def modules() -> dict[str, Path]:
    found = {}
    for folder, package in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


MODULES = modules()


def room(module: str) -> str:
    """The folder of a module; api is a room of its own."""
    folder = module if MODULES[module].stem == "__init__" else module.rpartition(".")[0]
    return module if module == "meshfold.api" else folder


def layer(module: str) -> int:
    """Its place in ORDER; -1 for what all share, and for folders that hold folders alone."""
    is_shared = module in SHARED or room(module) not in ORDER
    return -1 if is_shared else ORDER.index(room(module))


def may_import_torch(module: str) -> bool:
    return layer(module) >= FIRST_WITH_TORCH and module not in FACE_WITHOUT_TORCH


@cache
def imports(module: str) -> tuple[str, ...]:
    """Modules imported anywhere, type checking included: a type is a dependency too."""
    return tuple(_imports(parsed(module)))


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from [s for s in submodules if s in MODULES] or [node.module]


@cache
def parsed(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


DOORS = {
    "meshfold.codegen.chained_chunks",
    "meshfold.hierarchical_all_reduce",
    "meshfold.passes.chained_chunks",
    "meshfold.passes.collective_matmul",
}
"""Folders whose files only they themselves import; others import the folder."""


@pytest.mark.parametrize("folder", sorted(DOORS))
def test_optional_machinery_has_one_entry(folder: str) -> None:
    outside = [module for module in MODULES if room(module) != folder]
    inside = {module for module in MODULES if module.startswith(f"{folder}.")}
    assert [m for m in outside if inside & set(imports(m))] == []


def test_the_order_names_every_folder_once() -> None:
    rooms = {room(m) for m in MODULES if m not in SHARED and MODULES[m].stem != "__init__"}
    assert sorted(ORDER) == sorted(rooms)


# One test of all modules: hundreds of tests cost more than what they look at.
# The package's __init__ is exempt: its imports of upper layers are lazy (PEP 562).
def test_imports_go_down() -> None:
    found = {module: wrong_imports(module) for module in MODULES if module != "meshfold"}
    assert {module: names for module, names in found.items() if names} == {}


def wrong_imports(module: str) -> set[str]:
    """Of upper layers, and of torch where it is not met yet."""
    ours = [name for name in imports(module) if name.split(".")[0] == "meshfold"]
    upper = {name for name in ours if layer(name) > layer(module)}
    if may_import_torch(module):
        return upper
    return upper | ({name.split(".")[0] for name in imports(module)} & {"torch", "transformers"})


def test_no_import_inside_a_function() -> None:
    found = {
        f"{module}, {function.name}, line {node.lineno}"
        for module in MODULES
        for function in ast.walk(parsed(module))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert found == set()


def loaded_by(code: str) -> set[str]:
    """Top-level names of the modules that a fresh interpreter holds after `code`."""
    report = "import sys; print(*{m.split('.')[0] for m in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], check=True, capture_output=True, text=True
    )
    return set(done.stdout.splitlines()[-1].split())


def test_lower_layers_and_the_command_line_start_without_torch() -> None:
    without = sorted(m for m in MODULES if not may_import_torch(m))
    assert not loaded_by(f"import {', '.join(without)}") & {"torch", "transformers"}
